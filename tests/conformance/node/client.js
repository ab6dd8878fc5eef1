// What the official Node client sees of a broker, told as JSON: the same scenarios as the Python
// client's (python_client.py), and the same words for what was seen.
'use strict';

const {
  ConsumeResult, FilterExpression, LitePushConsumerBuilder, Producer, PushConsumer, SimpleConsumer,
} = require('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = require(
  'rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

// The least that the endpoint gives a SimpleConsumer.
const INVISIBLE_MS = 10_000;
// How long a scenario waits for what should come within milliseconds.
const PATIENCE_MS = 25_000;

const quiet = { info() {}, warn() {}, error() {}, debug() {}, close() {} };
if (process.env.CONFORMANCE_LOG) {
  quiet.error = quiet.warn = (...args) => console.error(...args);
}

class Place {
  constructor(fields) {
    Object.assign(this, fields);
  }

  topic(scenario) {
    return `${this.prefix}-${scenario}`;
  }

  options(more = {}) {
    return { endpoints: this.endpoints, namespace: '', logger: quiet, ...more };
  }

  producer(topics, more = {}) {
    return new Producer(this.options({ topics, ...more }));
  }

  consumer(topic, group, more = {}) {
    const subscriptions = new Map([[topic, more.filter ?? '*']]);
    const awaitDuration = more.awaitDuration ?? 5000;
    return new SimpleConsumer(
      this.options({ consumerGroup: group, subscriptions, ...more, awaitDuration }));
  }
}

// All clients of the process: those that are slow to shut down do it beside the other scenarios.
const running = [];

async function start(...clients) {
  for (const client of clients) {
    await client.startup();
    running.push(client);
  }
}

function told(message) {
  return {
    body: message.body.toString(),
    topic: message.topic,
    tag: message.tag ?? null,
    keys: [...message.keys].sort(),
    properties: Object.fromEntries(message.properties),
    group: message.messageGroup ?? null,
    lite_topic: message.liteTopic ?? null,
    priority: message.priority ?? null,
    attempt: message.deliveryAttempt ?? null,
    id: message.messageId,
    corrupted: message.corrupted === true,
    at_ms: Date.now(),
  };
}

async function take(consumer, n, patience = PATIENCE_MS) {
  const found = [];
  const giveUpAt = Date.now() + patience;
  while (found.length < n && Date.now() < giveUpAt) {
    for (const message of await consumer.receive(32, INVISIBLE_MS)) {
      found.push(told(message));
      await consumer.ack(message);
    }
  }
  return found;
}

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return error.name;
  }
  return '';
}

const body = text => Buffer.from(text);

// A listener that remembers, and fails the bodies it is told to, so many times each.
class Heard {
  messages = [];

  constructor(fail = {}) {
    this.fail = new Map(Object.entries(fail));
  }

  consume(message) {
    const facts = told(message);
    this.messages.push(facts);
    const left = this.fail.get(facts.body) ?? 0;
    this.fail.set(facts.body, left - 1);
    return left > 0 ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
  }

  async wait(n) {
    const giveUpAt = Date.now() + PATIENCE_MS;
    while (this.messages.length < n && Date.now() < giveUpAt) {
      await new Promise(resolve => setTimeout(resolve, 10));
    }
    return [...this.messages];
  }
}

function push(place, topic, group, messageListener) {
  return new PushConsumer(place.options({
    consumerGroup: group, subscriptions: new Map([[topic, '*']]), messageListener,
    longPollingTimeout: 5000,
  }));
}

async function normal(place) {
  const topic = place.topic('normal');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`, { awaitDuration: 1000 });
  await start(producer, consumer);
  const sent = [];
  for (let i = 0; i < 5; i++) {
    const receipt = await producer.send({
      topic, body: body(`n${i}`), tag: 't', keys: [`k${i}`], properties: new Map([['p', `${i}`]]),
    });
    sent.push(receipt.messageId);
  }
  const got = await take(consumer, 5);
  return { sent, got, again: (await consumer.receive(32, INVISIBLE_MS)).length };
}

async function fifo(place) {
  const topic = place.topic('fifo');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`, { awaitDuration: 2000 });
  await start(producer, consumer);
  for (let i = 0; i < 6; i++) {
    await producer.send({ topic, body: body(`${i >> 1}`), messageGroup: `g${i % 2}` });
  }
  return { got: await take(consumer, 6) };
}

async function delay(place) {
  const topic = place.topic('delay');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`, { awaitDuration: 10_000 });
  await start(producer, consumer);
  const due = Date.now() + 2345;
  await producer.send({ topic, body: body('later'), deliveryTimestamp: new Date(due) });
  return { due_ms: due, got: await take(consumer, 1) };
}

async function recall(place) {
  const topic = place.topic('recall');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`, { awaitDuration: 10_000 });
  await start(producer, consumer);
  // Late enough that it is called back before, beside all the other scenarios.
  const due = Date.now() + 8000;
  const calledBack = await producer.send({
    topic, body: body('no'), deliveryTimestamp: new Date(due),
  });
  const kept = await producer.send({
    topic, body: body('yes'), deliveryTimestamp: new Date(due + 500),
  });
  const recalled = await producer.recallMessage(topic, calledBack.recallHandle);
  const got = await take(consumer, 1);
  const late = await refused(() => producer.recallMessage(topic, kept.recallHandle));
  return { id: calledBack.messageId, recalled: recalled.messageId, got, late };
}

async function priority(place) {
  const topic = place.topic('priority');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`);
  await start(producer, consumer);
  for (const level of [1, 9, 5]) {
    await producer.send({ topic, body: body(`${level}`), priority: level });
  }
  return { got: await take(consumer, 3) };
}

async function transaction(place) {
  const topic = place.topic('transaction');
  const asked = [];
  const checker = {
    async check(message) {
      asked.push(message.body.toString());
      return message.body.toString().endsWith('commit')
        ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
    },
  };
  const producer = place.producer([topic], { checker });
  const consumer = place.consumer(topic, `${topic}-group`, { awaitDuration: 2000 });
  await start(producer, consumer);
  for (const [text, end] of [['orphan commit', null], ['a', 'commit'], ['b', 'rollback']]) {
    const half = producer.beginTransaction();
    await producer.send({ topic, body: body(text) }, half);
    if (end) await half[end]();
  }
  const got = await take(consumer, 1);
  const orphan = await take(consumer, 1, PATIENCE_MS * 2);
  return { got, asked, orphan };
}

async function sendAsync(place) {
  const topic = place.topic('send-async');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`);
  await start(producer, consumer);
  const receipts = await Promise.all(
    Array.from({ length: 100 }, (_, i) => producer.send({ topic, body: body(`${i}`) })));
  return { sent: receipts.map(receipt => receipt.messageId), got: await take(consumer, 100) };
}

async function refusals(place) {
  const topic = place.topic('fifo');
  const once = place.topic('receipts');
  const missing = place.topic('missing');
  const producer = place.producer([topic, once]);
  const consumer = place.consumer(once, `${once}-group`);
  await start(producer, consumer);
  await producer.send({ topic: once, body: body('once') });
  const twice = async () => {
    for (const message of await consumer.receive(1, INVISIBLE_MS)) {
      await consumer.ack(message);
      await consumer.ack(message);
    }
  };
  return {
    wrong_type: await refused(() => producer.send({ topic, body: body('x') })),
    missing: await refused(() => producer.send({ topic: missing, body: body('x') })),
    receipt: await refused(twice),
  };
}

async function namespaces(place) {
  const topic = place.topic('shared-name');
  const got = {};
  for (const namespace of ['north', 'south']) {
    const producer = place.producer([topic], { namespace });
    const consumer = place.consumer(topic, 'readers', { namespace, awaitDuration: 1000 });
    await start(producer, consumer);
    await producer.send({ topic, body: body(namespace) });
    got[namespace] = await take(consumer, 1);
    got[`${namespace} again`] = (await consumer.receive(32, INVISIBLE_MS)).map(told);
  }
  return got;
}

async function overTls(place) {
  const topic = place.topic('tls');
  const tls = { endpoints: place.tls_endpoints, sslEnabled: true };
  const producer = place.producer([topic], tls);
  const consumer = place.consumer(topic, `${topic}-group`, tls);
  await start(producer, consumer);
  const sent = (await producer.send({ topic, body: body('sealed') })).messageId;
  return { sent: [sent], got: await take(consumer, 1) };
}

async function access(place) {
  const topic = place.topic('access');
  const attempt = (accessKey, accessSecret, to, patience = 5000) => refused(async () => {
    const sessionCredentials = accessKey ? { accessKey, accessSecret } : undefined;
    const more = { endpoints: place.secured_endpoints, sessionCredentials };
    const producer = place.producer([to], more);
    // A producer whose telemetry is refused would wait for its settings forever.
    const started = producer.startup();
    started.catch(() => {});
    const silence = new Promise((_, reject) => {
      setTimeout(() => reject(Object.assign(new Error(), { name: 'Silence' })), patience).unref();
    });
    await Promise.race([started, silence]);
    running.push(producer);
    await producer.send({ topic: to, body: body('x') });
  });
  const good = place.users.writer;
  return {
    good: await attempt('writer', good, topic, PATIENCE_MS),
    bad: await attempt('writer', 'wrong', topic),
    unknown: await attempt('nobody', good, topic),
    anonymous: await attempt('', '', topic),
    denied: await attempt('writer', good, place.topic('forbidden')),
  };
}

async function filters(place) {
  const topic = place.topic('filters');
  const producer = place.producer([topic]);
  await start(producer);
  for (const [tag, size] of [['a', '1'], ['b', '5'], ['c', '9']]) {
    await producer.send({
      topic, body: body(`${tag}${size}`), tag, properties: new Map([['size', size]]),
    });
  }
  const chosen = async (group, filter, n) => {
    const consumer = place.consumer(topic, `${topic}-${group}`, { filter, awaitDuration: 1000 });
    await start(consumer);
    const got = await take(consumer, n);
    return [...got, ...(await consumer.receive(32, INVISIBLE_MS)).map(told)];
  };
  return {
    tags: await chosen('tags', 'a || b', 2),
    sql: await chosen(
      'sql', new FilterExpression("size > 3 AND TAGS <> 'b'", FilterType.SQL), 1),
  };
}

async function invisible(place) {
  const topic = place.topic('invisible');
  const producer = place.producer([topic]);
  const consumer = place.consumer(topic, `${topic}-group`);
  await start(producer, consumer);
  await producer.send({ topic, body: body('x') });
  const [first] = await consumer.receive(1, 30_000);
  const before = first.receiptHandle;
  const askedMs = Date.now();
  await consumer.changeInvisibleDuration(first, 1000);
  const renewed = first.receiptHandle;
  first.receiptHandle = before;
  return {
    asked_ms: askedMs, new_handle: before !== renewed,
    old_handle: await refused(() => consumer.ack(first)),
    got: await take(consumer, 1),
  };
}

async function pushConcurrent(place) {
  const topic = place.topic('push');
  const heard = new Heard({ p3: 1 });
  const producer = place.producer([topic]);
  await start(producer, push(place, topic, `${topic}-group`, heard));
  for (let i = 0; i < 40; i++) {
    await producer.send({
      topic, body: body(`p${i}`), tag: 't', keys: ['k'], properties: new Map([['p', 'q']]),
    });
  }
  return { got: await heard.wait(41) };
}

async function pushFifo(place) {
  const topic = place.topic('push-fifo');
  const heard = new Heard({ h1: 99 });
  const producer = place.producer([topic]);
  await start(producer, push(place, topic, `${topic}-group`, heard));
  for (let i = 0; i < 4; i++) {
    for (const messageGroup of ['g', 'h']) {
      await producer.send({ topic, body: body(`${messageGroup}${i}`), messageGroup });
    }
  }
  return { got: await heard.wait(10) };
}

async function lite(place) {
  const topic = place.topic('lite');
  const heard = new Heard();
  const producer = place.producer([topic]);
  await start(producer);
  const consumer = await new LitePushConsumerBuilder()
    .setClientConfiguration(place.options())
    .setConsumerGroup(`${topic}-push`)
    .bindTopic(topic)
    .setMessageListener(heard)
    .build();
  running.push(consumer);
  await consumer.subscribeLite('room-1');
  for (let i = 0; i < 6; i++) {
    await producer.send({ topic, body: body(`${i}`), liteTopic: `room-${i % 3}` });
  }
  const got = await heard.wait(2);
  await consumer.unsubscribeLite('room-1');
  return { push: got };
}

const SCENARIOS = {
  normal, fifo, delay, recall, priority, transaction, send_async: sendAsync, refusals, namespaces,
  over_tls: overTls, access, filters, invisible, push_concurrent: pushConcurrent,
  push_fifo: pushFifo, lite,
};

async function attempt(name, place) {
  try {
    return await SCENARIOS[name](place);
  } catch (error) {
    return { error: `${error.name}: ${error.message}` };
  }
}

async function main() {
  const { scenarios, place } = JSON.parse(process.argv[2]);
  const at = new Place(place);
  const found = await Promise.all(
    scenarios.map(async name => [name, await attempt(name, at)]));
  process.stdout.write(`${JSON.stringify(Object.fromEntries(found))}\n`);
  // A push consumer's shutdown waits for the end of its long poll.
  await Promise.race([
    Promise.allSettled(running.map(client => client.shutdown())),
    new Promise(resolve => setTimeout(resolve, 500)),
  ]);
  process.exit(0);
}

main();
