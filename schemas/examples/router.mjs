// A router for kvbus in JavaScript: the engine with the fewest unfinished requests. Everything it knows of the bus is in
// schemas/kvbus.asyncapi.json: subjects kvbus.v1.<plane>.<event>.<from>.<to>.<key>, messages as MessagePack maps.
//   npm install @nats-io/transport-node @msgpack/msgpack
//   node router.mjs NAME [nats://127.0.0.1:4222]     then: kvbus router --guest NAME, or --shadow NAME
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";

const [name, servers = "nats://127.0.0.1:4222"] = process.argv.slice(2);
const seedFile = process.env.KVBUS_NKEY_SEED_FILE; // where NATS has keys: `kvbus auth init --guest NAME`
const authenticator = seedFile ? nkeyAuthenticator(Buffer.from(readFileSync(seedFile, "utf8").trim())) : undefined;
const connection = await connect({ servers, name, authenticator, maxReconnectAttempts: -1 });
const incarnation = randomBytes(6).toString("hex"); // new at every start
let seq = 0; // counts what this process says, from 1

function least(engines) {
  const unfinished = (engine) => (engine.running ?? 0) + (engine.waiting ?? 0); // what is 0 is left out on the wire
  return engines.reduce((best, engine) => (unfinished(engine) < unfinished(best) ? engine : best)).engine_id;
}

function choose(asked) {
  const prefills = asked.engines.filter((engine) => engine.role === "prefill");
  const decodes = asked.engines.filter((engine) => engine.role === "decode");
  if (asked.part === "decode") return { mode: "deferred", prefill_id: "", decode_id: least(decodes) };
  const mode = prefills.length ? (asked.asked ?? "early") : "local";
  return {
    mode,
    prefill_id: mode === "local" ? "" : least(prefills),
    decode_id: mode === "deferred" ? "" : least(decodes),
    reason: "fewest unfinished",
  };
}

function onAsked(error, message) {
  if (error) return;
  let asked;
  try {
    asked = decode(message.data);
  } catch {
    return; // nobody's message
  }
  if (asked?.type !== "RouteAsked") return; // of a newer kvbus
  const envelope = { type: "RouteAnswered", source: name, incarnation, seq: ++seq, sent_unix_us: Date.now() * 1000 };
  const answer = { ...envelope, ask_id: asked.ask_id, ...choose(asked) };
  connection.publish(`kvbus.v1.route.route_answered.${name}.${asked.source}.${asked.ask_id}`, encode(answer));
}

for (const to of [name, "all"]) {
  // what is for this router, and what is for whoever listens
  connection.subscribe(`kvbus.v1.route.route_asked.*.${to}.*`, { callback: onAsked });
}
await connection.flush();
console.log(`${name} answers`);
