// The panel at the side: one transfer, or one conversation. What it shows is in the address, so that it can be shared.

import { $, h, say } from "/dom.js";
import { opened } from "/transfers.js";
import { waterfall } from "/waterfall.js";
import { conversation, summaryFacts, why } from "/why.js";

const AGAIN_MS = 1000;
const TABS = ["waterfall", "why", "conversation"];
let shown = { kind: "", id: "" };
let tab = "waterfall";
let zoomed = true;
let detail = null;
let talk = null;
let back = null;
let timer = 0;
let turn = 0;

async function ask(path, id) {
  const answer = await fetch(`${path}?id=${encodeURIComponent(id)}`, { cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

/** Show what the address says. */
export function followAddress() {
  const [, kind, id] = /^#([tc])=(.+)$/.exec(location.hash) ?? [];
  if (!kind) {
    close();
    return;
  }
  const fresh = $("detail").hidden;
  if (fresh) back = document.activeElement;
  shown = { kind, id: decodeURIComponent(id) };
  detail = talk = null;
  if (kind === "c") tab = "conversation";
  else if (tab === "conversation" && fresh) tab = "waterfall";
  $("detail").hidden = false;
  $("pane").replaceChildren(h("p", { class: "empty" }, "…"));
  $("detail-summary").replaceChildren();
  load();
  $("detail-title").focus({ preventScroll: true });
}

async function load() {
  clearTimeout(timer);
  const mine = ++turn;
  const { kind, id } = shown;
  opened(kind === "t" ? id : "");
  try {
    const found = kind === "t" ? await ask("/api/transfer", id) : null;
    const key = kind === "c" ? id : found.summary.conversation;
    const turns = key && tab === "conversation" ? await ask("/api/conversation", key) : null;
    if (mine !== turn) return;
    [detail, talk] = [found, turns ?? talk];
    draw();
    if (!document.hidden && (detail?.summary.running || (kind === "c" && talk.turns.some((one) => one.running)))) timer = setTimeout(load, AGAIN_MS);
  } catch (error) {
    if (mine === turn) $("pane").replaceChildren(h("p", { class: "empty", role: "alert" }, error.message));
  }
}

function draw() {
  const title = $("detail-title");
  title.replaceChildren(shown.kind === "c" ? "Conversation " : "Transfer ", h("span", { class: "id" }, shown.id));
  $("detail-summary").replaceChildren(...(detail ? summaryFacts(detail) : []));
  $("detail-summary").hidden = !detail;
  for (const name of TABS) {
    const button = $(`tab-${name}`);
    button.setAttribute("aria-selected", String(name === tab));
    button.tabIndex = name === tab ? 0 : -1;
    button.hidden = (shown.kind === "c" && name !== "conversation") || (name === "conversation" && detail && !detail.summary.conversation);
  }
  $("pane").setAttribute("aria-labelledby", `tab-${tab}`);
  const keep = $("pane").scrollTop;
  $("pane").replaceChildren(...attempts(), ...content());
  $("pane").scrollTop = keep;
}

function content() {
  if (tab === "conversation") return talk ? conversation(talk, shown.kind === "t" ? shown.id : "") : [h("p", { class: "empty" }, "…")];
  if (tab === "why") return why(detail);
  return waterfall(detail, zoomed, (value) => {
    zoomed = value;
    draw();
  });
}

function attempts() {
  if (!detail?.attempts.length || tab === "conversation") return [];
  const links = detail.attempts.map((one) => h("a", { class: "chip", href: `#t=${encodeURIComponent(one.id)}`, "aria-current": one.id === shown.id ? "true" : false }, `attempt ${one.attempt}: ${one.outcome}`));
  return [h("div", { class: "attempts" }, links)];
}

export function choose(name) {
  if ($("detail").hidden || $(`tab-${name}`).hidden) return;
  tab = name;
  if (detail || talk) draw();
  load();
}

export function close() {
  if ($("detail").hidden) return;
  clearTimeout(timer);
  turn += 1;
  $("detail").hidden = true;
  opened("");
  if (location.hash) history.replaceState(null, "", location.pathname);
  if (back?.isConnected) back.focus({ preventScroll: true });
}

export async function find(id) {
  try {
    const found = await ask("/api/find", id);
    location.hash = `#${found.kind === "conversation" ? "c" : "t"}=${encodeURIComponent(found.id)}`;
    say($("said"), "");
    return "";
  } catch (error) {
    return error.message;
  }
}

for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => choose(name));
$("detail-close").addEventListener("click", close);
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const open = TABS.filter((name) => !$(`tab-${name}`).hidden);
  const next = open[(open.indexOf(tab) + step + open.length) % open.length];
  choose(next);
  $(`tab-${next}`).focus();
});
