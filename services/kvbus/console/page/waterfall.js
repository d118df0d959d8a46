// One dispatch on a time axis: its stages as bars, then every message as a row.

import { h } from "/dom.js";
import { ms, plural } from "/format.js";

const MARGIN = 1.08;
const LONG = 2.5;

/** `detail` is what /api/transfer says; `zoomed` shows the time up to the first token only. */
export function waterfall(detail, zoomed, onZoom) {
  const first = detail.stages.find((stage) => stage.stage === "first byte");
  const last = Math.max(0.001, ...detail.lines.map((line) => line.ms), ...detail.stages.map((stage) => stage.ms));
  const canZoom = first !== undefined && last > first.ms * LONG;
  const zoom = canZoom && zoomed;
  const span = (zoom ? first.ms : last) * (zoom ? MARGIN : 1);
  const grid = h("div", { class: "fall", role: "table", "aria-label": "Stages and messages on a time axis" });
  grid.append(axis(span));
  for (const stage of detail.stages) grid.append(stageRow(stage, span, first));
  const messages = h("div", { class: "fall", role: "table", "aria-label": "Messages" });
  messages.append(axis(span), ...detail.lines.map((line) => messageRow(line, span, first)));
  const left = detail.lines_left_out ? ` and ${plural(detail.lines_left_out, "more")}` : "";
  return [
    h("h3", {}, "Stages", h("small", {}, first ? "the critical path to the first token is marked" : "no first token yet"), canZoom ? zoomButtons(zoom, onZoom) : null),
    grid,
    h("h3", {}, "Messages", h("small", {}, `${detail.lines.length}${left}, each a row; a bar is what the message says that it took`)),
    messages,
  ];
}

function zoomButtons(zoom, onZoom) {
  const button = (text, value) => {
    const made = h("button", { type: "button", "aria-pressed": String(zoom === value) }, text);
    made.addEventListener("click", () => onZoom(value));
    return made;
  };
  return h("span", { class: "zoom" }, button("to first token", true), button("whole", false));
}

function axis(span) {
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const tick = h("span", {}, share ? ms(span * share) : "0");
    tick.style.left = `${share * 100}%`;
    return tick;
  });
  return h("div", { class: "axis", "aria-hidden": "true" }, h("span", { class: "at" }, "at"), h("span", { class: "what" }), h("span", { class: "track" }, ticks));
}

function firstLine(span, first) {
  if (!first || first.ms > span) return null;
  const line = h("u", { title: "first token" });
  line.style.left = `${(100 * first.ms) / span}%`;
  return line;
}

function bar(fromMs, toMs, span, kind) {
  const element = h("i", { class: kind });
  const [from, to] = [Math.max(0, fromMs), Math.min(toMs, span)];
  element.style.left = `${(100 * from) / span}%`;
  element.style.width = `${Math.max(0, (100 * (to - from)) / span)}%`;
  return element;
}

function stageRow(stage, span, first) {
  const note = stage.critical ? "critical path" : "";
  const share = stage.share ? `${Math.round(stage.share * 100)} %` : "";
  const track = h("span", { class: "track", role: "cell" }, bar(stage.ms - stage.took_ms, stage.ms, span, ""), firstLine(span, first));
  return h(
    "div",
    { class: `stage${stage.critical ? " critical" : ""}`, role: "row", title: `${ms(stage.took_ms)} up to “${stage.stage}”` },
    h("span", { class: "at", role: "cell" }, stage.ms.toFixed(1)),
    h("span", { class: "what", role: "cell" }, h("span", { class: "name" }, stage.stage), note ? h("span", { class: "chip warn" }, note) : null, h("span", { class: "share" }, `${ms(stage.took_ms)} ${share}`)),
    track,
  );
}

function messageRow(line, span, first) {
  const marks = [];
  if (line.took_ms) marks.push(bar(line.ms - line.took_ms, line.ms, span, `took ${line.plane}`));
  if (line.ms <= span) {
    const dot = h("i", { class: `dotty ${line.plane}` });
    dot.style.left = `${(100 * line.ms) / span}%`;
    marks.push(dot);
  } else {
    marks.push(h("span", { class: "beyond" }, "later ›"));
  }
  return h(
    "div",
    { class: "message", role: "row", title: line.type },
    h("span", { class: "at", role: "cell" }, line.ms.toFixed(1)),
    h("span", { class: "what", role: "cell" }, h("span", { class: "who" }, `${line.from} → ${line.to}`), h("span", { class: "text" }, line.what)),
    h("span", { class: "track", role: "cell" }, marks, firstLine(span, first)),
  );
}
