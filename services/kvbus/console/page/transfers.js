// Running transfers as they happen, and those that are over.

import { $, Rows, arrows, h, mark, say } from "/dom.js";
import { age, clock, ms, short } from "/format.js";
import { now } from "/now.js";

const STEPS = { asked: 1, routed: 2, prefill: 3, writing: 4, landing: 4, decode: 5 };
const LINGER_MS = 900;
const EMPTY_MS = 1200;
const LINGER_ROWS = 140; // with more than these, what is over goes at once
export const OUTCOMES = { completed: "good", failed: "bad", expired: "bad", cancelled: "warn", retried: "warn", open: "" };

export const linkTo = (id, chars = 8) => h("a", { class: "id", href: `#t=${encodeURIComponent(id)}`, title: id }, short(id, chars));

function route() {
  const [from, into] = [h("span", { class: "from" }), h("span", { class: "into" })];
  const arrow = h("span", { class: "arrow" }, "→");
  const el = h("td", {}, from, arrow, into);
  return {
    el,
    update: (row) => {
      say(from, row.prefill);
      say(into, row.decode || (row.mode === "deferred" ? "(later)" : ""));
      arrow.hidden = !row.prefill;
      mark(el, "title", `${row.prefill} → ${row.decode}, ${row.mode}`);
    },
  };
}

// A transfer keeps its place while it runs. When it is over its place stays, pale, then empty for a moment, in which the
// next one may take it: under load nothing jumps.
class Running {
  constructor(body) {
    this.body = body;
    this.known = new Map();
    this.empty = new Map();
  }

  show(rows) {
    const keys = new Set(rows.map((row) => row.id));
    for (const [id, known] of this.known) {
      if (keys.has(id) || known.over) continue;
      known.over = performance.now();
      mark(known.el, "class", "over");
    }
    this.clear();
    for (const row of rows) {
      let known = this.known.get(row.id);
      if (!known) {
        known = this.make(row);
        this.place(known.el);
        this.known.set(row.id, known);
      }
      known.row = row;
      known.update(row);
    }
  }

  /** Empty the places of what has been over for a while, and close those that nobody has taken. */
  clear() {
    const at = performance.now();
    const lingering = this.known.size > LINGER_ROWS ? 0 : LINGER_MS;
    for (const [id, known] of this.known) {
      if (!known.over || at - known.over < lingering) continue;
      const place = h("tr", { class: "gap", "aria-hidden": "true" }, h("td"));
      known.el.replaceWith(place);
      this.empty.set(place, at);
      this.known.delete(id);
    }
    for (const [place, since] of this.empty) {
      if (place.nextElementSibling && at - since < EMPTY_MS) continue;
      place.remove();
      this.empty.delete(place);
    }
  }

  place(element) {
    const free = this.empty.size ? this.body.querySelector("tr.gap") : null;
    if (free) {
      this.empty.delete(free);
      free.replaceWith(element);
    } else this.body.append(element);
  }

  make(row) {
    const steps = [1, 2, 3, 4, 5].map(() => h("i"));
    const [stage, old, talk] = [h("span"), h("td", { class: "n" }), h("td", { class: "wide muted id" })];
    const way = route();
    const el = h("tr", { "data-id": row.id }, h("td", {}, linkTo(row.id)), way.el, h("td", {}, h("span", { class: "steps", "aria-hidden": "true" }, steps), stage), talk, old);
    const update = (next) => {
      way.update(next);
      say(stage, next.stage);
      steps.forEach((step, index) => mark(step, "class", index < (STEPS[next.stage] ?? 0) ? "done" : ""));
      say(talk, next.conversation ? short(next.conversation) : "");
      mark(talk, "title", next.conversation);
    };
    return { el, update, tick: (next) => say(old, age(now() - next.began)) };
  }
}

function finishedRow(row) {
  const way = route();
  const [outcome, reuse, ttft, total, at] = [h("span", { class: "chip" }), h("td"), h("td", { class: "n" }), h("td", { class: "n wide" }), h("td", { class: "wide muted" })];
  const el = h("tr", { "data-id": row.id }, h("td", {}, linkTo(row.id)), at, way.el, h("td", {}, outcome), reuse, ttft, total);
  const update = (next) => {
    way.update(next);
    say(at, clock(next.began));
    say(outcome, next.outcome);
    mark(outcome, "class", `chip ${OUTCOMES[next.outcome] ?? ""}`);
    mark(outcome, "title", next.status ? `HTTP ${next.status}, attempt ${next.attempt}` : "");
    say(reuse, next.reuse);
    mark(reuse, "class", next.reuse === "hit" ? "good" : "muted");
    say(ttft, ms(next.ttft_ms));
    say(total, ms(next.duration_ms));
  };
  return { el, update };
}

const running = new Running($("running").tBodies[0]);
const finished = new Rows($("finished").tBodies[0], (row) => row.id, finishedRow);
arrows($("running"));
arrows($("finished"));

export function showRunning(section) {
  running.show(section.rows);
  const more = section.count - section.rows.length;
  say($("running-count"), section.count ? (more > 0 ? `${section.count}, the oldest ${section.rows.length} shown` : section.count) : "");
  $("running-empty").hidden = running.known.size > 0;
}

export function showFinished(section) {
  finished.show(section.rows);
  const of = section.count === section.of ? section.count : `${section.count} of ${section.of}`;
  say($("finished-count"), section.of ? `${of}${section.count > section.rows.length ? `, the newest ${section.rows.length} shown` : ""}` : "");
  $("finished-empty").hidden = section.rows.length > 0;
}

export function tickRunning() {
  for (const known of running.known.values()) if (!known.over) known.tick(known.row);
  running.clear();
  $("running-empty").hidden = running.known.size > 0;
}

/** Mark the row of the transfer that is looked at. */
export function opened(id) {
  for (const rows of [running, finished]) for (const [key, known] of rows.known) known.el.classList.toggle("open", key === id);
}
