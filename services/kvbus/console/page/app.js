// The page: frames come in, sections are drawn; pause, filters, keys.

import { choose, close, find, followAddress } from "/detail.js";
import { $, h, mark, say } from "/dom.js";
import { hold, setNow } from "/now.js";
import { showBus, showEngines, showLetters, showProcesses, showTotals, tickOverview } from "/overview.js";
import { showFinished, showRunning, tickRunning } from "/transfers.js";

const RETRY_MS = 2000;
const TICK_MS = 250;
const SHOW = { totals: showTotals, engines: showEngines, processes: showProcesses, running: showRunning, finished: showFinished, letters: showLetters, bus: showBus };
const state = { paused: false, waiting: {}, now: 0, bus: null, source: null, filters: {} };

function connect() {
  state.source?.close();
  const query = new URLSearchParams(Object.entries(state.filters).filter(([, value]) => value));
  const source = new EventSource(`/events?${query}`);
  state.source = source;
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onopen = () => trouble("reach", null);
  source.onerror = () => {
    trouble("reach", ["The console does not answer", "It was stopped, or the network is gone. This page comes back by itself.", ""]);
    if (source.readyState === EventSource.CLOSED) setTimeout(() => state.source === source && connect(), RETRY_MS);
  };
}

function take(frame) {
  state.now = frame.now;
  if (frame.bus) busNews(frame.bus);
  if (state.paused) {
    Object.assign(state.waiting, frame);
    return;
  }
  draw(frame);
}

function draw(frame) {
  setNow(frame.now ?? state.now);
  for (const [name, show] of Object.entries(SHOW)) if (frame[name] !== undefined) show(frame[name]);
  if (frame.engines) engineChoices(frame.engines);
  tick();
}

function busNews(bus) {
  const text = bus.connected ? null : ["NATS is away", bus.problem, "What is below is what was last heard. It heals by itself; kvbus doctor --nats URL tells more."];
  trouble("bus", text);
}

const troubles = new Map();
function trouble(kind, text) {
  if (text) troubles.set(kind, text);
  else troubles.delete(kind);
  const [first] = ["reach", "bus"].map((name) => troubles.get(name)).filter(Boolean);
  const box = $("trouble");
  box.hidden = !first;
  if (!first) return;
  say(box.querySelector("strong"), first[0]);
  say(box.querySelector("p"), first[1]);
  say(box.querySelector("code"), first[2]);
}

function engineChoices(rows) {
  const select = $("filters").elements.engine;
  const names = rows.map((row) => row.id);
  const known = [...select.options].slice(1).map((option) => option.value);
  if (names.join("\n") === known.join("\n")) return;
  const chosen = select.value;
  const all = names.includes(chosen) || !chosen ? names : [chosen, ...names];
  select.replaceChildren(h("option", { value: "" }, "any"), ...all.map((name) => h("option", { value: name }, name)));
  select.value = chosen;
}

function pause() {
  state.paused = !state.paused;
  const button = $("pause");
  mark(button, "aria-pressed", state.paused);
  say(button.querySelector("span"), state.paused ? "Paused" : "Pause");
  hold(state.paused);
  if (state.paused) return;
  const waiting = state.waiting;
  state.waiting = {};
  draw(waiting);
}

function tick() {
  if (state.paused || document.hidden) return;
  tickRunning();
  tickOverview();
}

$("pause").addEventListener("click", pause);
$("help").addEventListener("click", () => $("keys").showModal());
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("change", () => {
  state.filters = Object.fromEntries(new FormData($("filters")));
  connect();
});
$("find").addEventListener("submit", async (event) => {
  event.preventDefault();
  const id = $("find-id").value.trim();
  const problem = id ? await find(id) : "";
  $("find-id").setCustomValidity(problem);
  $("find-id").reportValidity();
});
$("find-id").addEventListener("input", () => $("find-id").setCustomValidity(""));

const KEYS = {
  "/": () => $("find-id").focus(),
  p: pause,
  "?": () => $("keys").showModal(),
  Escape: close,
  1: () => choose("waterfall"),
  2: () => choose("why"),
  3: () => choose("conversation"),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const typing = event.target.closest("input, select, textarea");
  if (typing && event.key !== "Escape") return;
  if (typing) typing.blur();
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
addEventListener("hashchange", followAddress);
// A browser keeps pages that were left, with their connections, of which it allows six to a host.
addEventListener("pagehide", () => state.source.close());
addEventListener("pageshow", (event) => event.persisted && connect());
setInterval(tick, TICK_MS);
connect();
followAddress();
