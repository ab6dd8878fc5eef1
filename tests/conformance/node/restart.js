// A producer and push consumers of the official Node client that live through a restart: the same
// as python_restart.py.
'use strict';

const { ConsumeResult, Producer, PushConsumer } = require('rocketmq-client-nodejs');

const GROUPS = 4;
const PAUSE_MS = 10;
// What was on its way to a consumer when the broker died is leased for a minute.
const PATIENCE_MS = 75_000;
const quiet = { info() {}, warn() {}, error() {}, debug() {}, close() {} };

const pause = () => new Promise(resolve => setTimeout(resolve, PAUSE_MS));

async function main() {
  const { place } = JSON.parse(process.argv[2]);
  const names = ['restart', 'restart-fifo'];
  const topics = names.map(name => `${place.prefix}-${name}`);
  const options = { endpoints: place.endpoints, namespace: '', logger: quiet };
  const heard = {};
  const clients = names.map((name, i) => {
    heard[name] = [];
    return new PushConsumer({
      ...options, consumerGroup: `${topics[i]}-group`, subscriptions: new Map([[topics[i], '*']]),
      messageListener: {
        consume(message) {
          const group = message.messageGroup ?? '';
          heard[name].push([Number(message.body.toString()), group, Date.now()]);
          return ConsumeResult.SUCCESS;
        },
      },
    });
  });
  const producer = new Producer({ ...options, topics });
  for (const client of [...clients, producer]) await client.startup();

  let stopped = false;
  process.stdin.on('end', () => { stopped = true; }).resume();
  const sent = [];
  for (let number = 0; !stopped; number++) {
    for (const [i, more] of [[0, {}], [1, { messageGroup: `g${number % GROUPS}` }]]) {
      for (;;) {
        try {
          await producer.send({ topic: topics[i], body: Buffer.from(`${number}`), ...more });
          break;
        } catch {
          await pause();
        }
      }
    }
    sent.push([number, Date.now()]);
    await pause();
  }
  const giveUpAt = Date.now() + PATIENCE_MS;
  const missing = name => new Set(heard[name].map(([number]) => number)).size < sent.length;
  while (names.some(missing) && Date.now() < giveUpAt) await pause();
  process.stdout.write(`${JSON.stringify({ sent, heard })}\n`, () => process.exit(0));
}

main();
