// Tiles, the state of the bus, engines and other processes.

import { $, Rows, h, mark, say, svg } from "/dom.js";
import { age, count, ms, plural, words } from "/format.js";
import { now } from "/now.js";

const SPARK = 60;
const TALL = 20;

function spark(tile, values) {
  const box = tile.querySelector("svg");
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${index},${(TALL - 1 - (value / most) * (TALL - 3)).toFixed(1)}`);
  if (!box.firstChild) box.append(svg("path", { class: "under" }), svg("path"));
  const line = `M${points.join("L")}`;
  mark(box.firstChild, "d", `${line}L${SPARK - 1},${TALL}L0,${TALL}Z`);
  mark(box.lastChild, "d", line);
}

function tile(id, value, unit, note, state = "") {
  const element = $(id);
  say(element.querySelector("b"), value);
  say(element.querySelector("p span"), unit);
  const small = element.querySelector("small");
  say(small, note);
  mark(small, "title", note);
  mark(element, "class", `tile ${state}`);
  return element;
}

export function showTotals(totals) {
  spark(tile("tile-rate", totals.per_s.toFixed(totals.per_s < 10 ? 1 : 0), "/s", `${totals.served} a minute, ${totals.failed} failed`, totals.failed ? "warn" : ""), totals.spark);
  const [value, unit] = ms(totals.ttft_p50_ms).split(" ");
  spark(tile("tile-ttft", value, unit ?? "", `p99 ${ms(totals.ttft_p99_ms)}, last minute`), totals.spark_ttft);
  showReuse(totals);
  tile("tile-running", totals.running, totals.running === 1 ? "transfer" : "transfers", totals.running ? "asked and not yet answered" : "nothing is under way");
}

function showReuse(totals) {
  const known = totals.reuse_hit_share !== null;
  const misses = totals.reuse.filter(([reason]) => reason !== "hit").map(([reason, number]) => `${words(reason)} ${number}`);
  const element = tile("tile-reuse", known ? Math.round(totals.reuse_hit_share * 100) : "–", known ? `% of ${count(totals.reuse_asked)}` : "", known ? misses.join(" · ") || "no miss in 10 minutes" : "no look-up in 10 minutes");
  const stack = element.querySelector(".stack");
  mark(stack, "aria-label", totals.reuse.map(([reason, number]) => `${words(reason)}: ${number}`).join(", ") || "none");
  while (stack.children.length > totals.reuse.length) stack.lastChild.remove();
  totals.reuse.forEach(([reason, number], index) => {
    const part = stack.children[index] ?? stack.appendChild(h("i"));
    part.style.flexGrow = number;
    mark(part, "title", `${words(reason)}: ${number}`);
    mark(part, "class", reason === "hit" ? "hit" : "");
  });
}

export function showLetters(letters) {
  const last = letters.rows[0];
  tile("tile-lost", letters.count, "", last ? `${last.source}: ${last.reason}` : "none was reported", letters.count ? "warn" : "");
}

export function showBus(bus) {
  const state = bus.connected ? (bus.catching_up ? "wait" : "good") : "bad";
  const element = $("bus");
  mark(element, "data-state", state);
  say(element.querySelector("b"), { good: "connected", wait: "reading the last minutes", bad: "NATS is away" }[state]);
  say(element.querySelector(".more"), bus.nats);
  const [value, unit] = ms(bus.lag_ms).split(" ");
  const losses = [bus.gaps && plural(bus.gaps, "gap"), bus.dropped && `${bus.dropped} dropped`, bus.undecodable && `${bus.undecodable} undecodable`].filter(Boolean);
  tile("tile-bus", bus.connected ? value : "–", bus.connected ? unit : "", losses.join(" · ") || `${Math.round(bus.per_s)} messages/s, no gap`, losses.length ? "warn" : "");
}

const STATES = { alive: "good", draining: "warn", gone: "bad", unknown: "" };

function engineRow() {
  const name = h("span", { class: "id" });
  const role = h("span", { class: "role" });
  const more = h("span");
  const chip = h("span", { class: "chip" });
  const load = h("span");
  const waiting = h("small");
  const free = h("span");
  const [used, held] = [h("i"), h("u")];
  const kept = h("span");
  const keptBlocks = h("small");
  const report = h("td", { class: "n" });
  const el = h("tr", {}, h("td", {}, name, h("small", {}, role, more)), h("td", {}, chip), h("td", {}, load, waiting), h("td", {}, free, h("span", { class: "meter" }, used, held)), h("td", {}, kept, keptBlocks), report);
  const update = (row) => {
    say(name, row.id);
    say(role, row.role);
    mark(role, "class", `role ${row.role}`);
    say(more, [row.role ? "" : null, row.model, row.incarnation, row.tp > 1 ? `tp ${row.tp}` : null].filter((part) => part !== null).join(" · "));
    mark(more, "title", more.textContent);
    say(chip, row.state);
    mark(chip, "class", `chip ${STATES[row.state] ?? ""}`);
    say(load, `${row.running} running`);
    say(waiting, `${row.waiting} waiting`);
    say(free, row.total ? `${row.free} of ${row.total}` : "–");
    used.style.width = row.total ? `${(100 * (row.total - row.free)) / row.total}%` : "0";
    held.style.width = row.total ? `${(100 * row.held_blocks) / row.total}%` : "0";
    say(kept, `${row.held} conv`);
    say(keptBlocks, plural(row.held_blocks, "block"));
    mark(kept, "title", `${plural(row.held, "conversation")} held`);
    mark(el, "class", row.state === "gone" ? "over" : "");
  };
  return { el, update, tick: (row) => say(report, row.load_at ? age(now() - row.load_at) : "–") };
}

function processRow() {
  const name = h("span", { class: "id" });
  const incarnation = h("span", { class: "muted" });
  const [kind, messages, last] = [h("td"), h("td", { class: "n" }), h("td", { class: "n" })];
  const el = h("tr", {}, h("td", {}, name, " ", incarnation), kind, messages, last);
  const update = (row) => {
    say(name, row.id);
    say(incarnation, row.incarnation);
    say(kind, row.kind);
    say(messages, count(row.messages));
  };
  return { el, update, tick: (row) => say(last, age(now() - row.at)) };
}

const engines = new Rows($("engines").tBodies[0], (row) => row.id, engineRow);
const processes = new Rows($("processes").tBodies[0], (row) => row.id, processRow);

export function showEngines(rows) {
  engines.show(rows);
  const gone = rows.filter((row) => row.state === "gone").length;
  const roles = ["prefill", "decode"].map((role) => `${rows.filter((row) => row.role === role && row.state !== "gone").length} ${role}`);
  say($("engines-count"), rows.length ? `${roles.join(", ")}${gone ? `, ${gone} gone` : ""}` : "");
  $("engines-empty").hidden = rows.length > 0;
}

export function showProcesses(rows) {
  processes.show(rows);
  say($("processes-count"), rows.length || "");
  $("processes-empty").hidden = rows.length > 0;
}

export function tickOverview() {
  for (const rows of [engines, processes]) for (const known of rows.known.values()) known.tick(known.row);
}
