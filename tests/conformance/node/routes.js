// The official Node client with a topic at three brokers, of which one stops and comes back: the
// same phases as in python_routes.py.
'use strict';

const readline = require('node:readline');
const { ConsumeResult, Producer, PushConsumer } = require('rocketmq-client-nodejs');

const GROUPS = 30;
const ROUNDS = 10;
// The same while a broker is away: each refused send takes seconds.
const ROUNDS_WITHOUT = 2;
const PATIENCE_MS = 75_000;
const quiet = { info() {}, warn() {}, error() {}, debug() {}, close() {} };
const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();

const port = endpoints => Number(String(endpoints.facade).split(':').pop());
const pause = () => new Promise(resolve => setTimeout(resolve, 10));
const count = rounds => rounds.reduce((sum, sent) => sum + (sent.bodies
  ? sent.bodies.length : Object.values(sent).reduce((n, bodies) => n + bodies.length, 0)), 0);

async function nextPhase(what) {
  process.stdout.write(`${what}\n`);
  await lines.next();
}

async function sendOrdered(producer, topic, first, { rounds = ROUNDS, patienceMs = 0 } = {}) {
  const sent = {};
  const giveUpAt = Date.now() + patienceMs;
  for (let number = first; number < first + rounds; number++) {
    for (let i = 0; i < GROUPS; i++) {
      const group = `g${i}`;
      const text = `${group}-${number}`;
      sent[group] ??= [];
      for (;;) {
        try {
          await producer.send({ topic, body: Buffer.from(text), messageGroup: group });
          sent[group].push(text);
          break;
        } catch {
          if (Date.now() >= giveUpAt) break;
          await pause();
        }
      }
    }
  }
  return sent;
}

async function sendPlain(producer, topic, prefix, n) {
  const ports = [];
  const bodies = [];
  for (let number = 0; number < n; number++) {
    const text = `${prefix}${number}`;
    try {
      const receipt = await producer.send({ topic, body: Buffer.from(text) });
      ports.push(port(receipt.endpoints));
      bodies.push(text);
    } catch {
      // That sends fail is a fact.
    }
  }
  return { ports, bodies };
}

async function wait(heard, n) {
  const giveUpAt = Date.now() + PATIENCE_MS;
  while (heard.length < n && Date.now() < giveUpAt) await pause();
}

async function transactions(options, topic, heard) {
  const producer = new Producer({ ...options, topics: [topic], checker: { async check() {} } });
  await producer.startup();
  const ports = new Set();
  for (let number = 0; number < 6; number++) {
    const half = producer.beginTransaction();
    const receipt = await producer.send({ topic, body: Buffer.from(`half ${number}`) }, half);
    ports.add(port(receipt.endpoints));
    await half.commit();
  }
  await wait(heard, 6);
  return { ports: [...ports].sort(), heard: [...heard] };
}

async function main() {
  const { place } = JSON.parse(process.argv[2]);
  const [topic, fifo, half] = ['', '-fifo', '-half'].map(each => `${place.prefix}-routed${each}`);
  const options = { endpoints: place.endpoints, namespace: '', logger: quiet };
  const heard = {};
  const clients = [topic, fifo, half].map(name => {
    heard[name] = [];
    return new PushConsumer({
      ...options, consumerGroup: `${name}-group`, subscriptions: new Map([[name, '*']]),
      messageListener: {
        consume(message) {
          heard[name].push(message.body.toString());
          return ConsumeResult.SUCCESS;
        },
      },
    });
  });
  const producer = new Producer({ ...options, topics: [topic, fifo] });
  for (const client of [...clients, producer]) await client.startup();

  const facts = { ordered: [await sendOrdered(producer, fifo, 0)], plain: [], heard };
  facts.plain.push(await sendPlain(producer, topic, 'first ', 30));
  await wait(heard[fifo], GROUPS * ROUNDS);
  facts.order = [...heard[fifo]];
  facts.transactions = await transactions(options, half, heard[half]);
  await nextPhase('all brokers');
  facts.ordered.push(await sendOrdered(producer, fifo, 10, { rounds: ROUNDS_WITHOUT }));
  facts.plain.push(await sendPlain(producer, topic, 'second ', 30));
  await nextPhase('without one');
  facts.ordered.push(await sendOrdered(producer, fifo, 20, { patienceMs: PATIENCE_MS }));
  facts.plain.push(await sendPlain(producer, topic, 'third ', 30));
  await wait(heard[topic], count(facts.plain));
  await wait(heard[fifo], count(facts.ordered));
  process.stdout.write(`${JSON.stringify(facts)}\n`, () => process.exit(0));
}

main();
