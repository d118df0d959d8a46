// Why a request went where it went, and what its conversation has seen.

import { h } from "/dom.js";
import { clock, ms, plural, short, size, words } from "/format.js";
import { OUTCOMES, linkTo } from "/transfers.js";

const fact = (name, value) => h("div", {}, h("span", {}, name), value === "" || value === null ? "–" : String(value));

export function why(detail) {
  if (!detail.decisions.length) return [h("p", { class: "empty" }, "No router has said why: it was routed by somebody else, or before this console began to listen.")];
  const parts = detail.decisions.flatMap((decision, index) => decisionView(decision, index, detail.decisions.length));
  if (detail.answers.length) parts.push(...answersView(detail.answers));
  return parts;
}

function decisionView(decision, index, of) {
  const title = of > 1 ? `Decision ${index + 1} of ${of}` : "Decision";
  const asked = decision.asked && decision.asked !== decision.mode ? `${decision.mode}, asked was ${decision.asked}` : decision.mode;
  const roles = ["prefill", "decode"].filter((role) => decision.candidates.some((one) => one.role === role));
  return [
    h("h3", {}, title, h("small", {}, decision.what)),
    h("div", { class: "facts" }, fact("Mode", asked), fact("Policy", decision.policy + (decision.canary ? " (canary)" : "")), fact("Reason", decision.reason), fact("Decided in", decision.decided_us ? `${decision.decided_us} µs` : ""), fact("Request body", decision.prompt_bytes ? size(decision.prompt_bytes) : ""), fact("Attempt", decision.attempt)),
    ...roles.map((role) => candidates(role, decision.candidates.filter((one) => one.role === role))),
    roles.length ? null : h("p", { class: "muted" }, "The decision names no candidates."),
    decision.left_out ? h("p", { class: "muted" }, `${plural(decision.left_out, "more engine")} not named`) : null,
  ].filter(Boolean);
}

function candidates(role, rows) {
  const [low, high] = [Math.min(...rows.map((one) => one.score)), Math.max(...rows.map((one) => one.score))];
  const body = rows.map((one) => {
    const width = h("i");
    width.style.width = `${high > low ? 10 + (90 * (one.score - low)) / (high - low) : 100}%`; // the best is full
    const terms = one.terms.map(([name, value]) => h("span", { class: "term" }, `${words(name)} `, h("b", {}, String(value))));
    const name = h("td", {}, h("span", { class: `id role ${role}` }, one.id), one.chosen ? " " : "", one.chosen ? h("span", { class: "chip good" }, "chosen") : "");
    const known = h("td", {}, terms, one.known ? h("div", { class: "muted" }, one.known) : "", terms.length || one.known ? "" : "–");
    return h("tr", { class: one.chosen ? "chosen" : "" }, name, h("td", {}, String(one.score), h("span", { class: "score" }, width)), known, h("td", { class: "n" }, one.load_age_ms ? ms(one.load_age_ms) : "–"));
  });
  const head = [role, "Score", "Terms, and what was known", "Load age"].map((text, index) => h("th", { scope: "col", class: index === 3 ? "n" : "" }, text));
  return h("table", { class: "cands", "aria-label": `Candidates for ${role}` }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

function answersView(answers) {
  const rows = answers.map((one) =>
    h("tr", {}, h("td", {}, h("span", { class: "id" }, one.from)), h("td", {}, one.shadow ? "compared only" : "asked"), h("td", {}, `${one.mode} ${one.prefill} → ${one.decode}`, one.reason ? h("div", { class: "muted" }, one.reason) : ""), h("td", {}, h("span", { class: `chip ${one.same ? "good" : "warn"}` }, one.same ? "same" : "differs"))),
  );
  const head = ["Router", "", "Answer", ""].map((text) => h("th", { scope: "col" }, text));
  return [h("h3", {}, "Answers of other routers", h("small", {}, "what is compared only is never used")), h("table", { class: "cands" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))];
}

export function conversation(talk, here) {
  const turns = talk.turns.map((turn, index) => turnView(turn, talk.count - talk.turns.length + index + 1, turn.id === here));
  const hits = talk.turns.filter((turn) => turn.reuse.word === "hit").length;
  return [
    h("h3", {}, "Conversation", h("small", {}, `${plural(talk.count, "turn")}, ${plural(hits, "hit")}`)),
    h("p", { class: "id muted" }, talk.id),
    h("ol", { class: "turns" }, turns),
  ];
}

const REUSE = { hit: "good", miss: "warn", released: "" };

function turnView(turn, number, here) {
  const { word, why: reason, tokens } = turn.reuse;
  const told = word === "hit" ? `${tokens} tokens taken back ${reason}` : word ? `${word}: ${reason}` : "KV was not asked for";
  const facts = [
    told,
    turn.tokens ? `${turn.tokens} prompt tokens` : "",
    turn.cached ? `${turn.cached} cached at prefill` : "",
    turn.moved_bytes ? `${size(turn.moved_bytes)} written` : "",
    turn.kept,
  ].filter(Boolean);
  return h(
    "li",
    { class: `${word}${here ? " here" : ""}`, "aria-current": here ? "true" : false },
    h("div", { class: "head" }, h("b", {}, `Turn ${number}`), linkTo(turn.id), h("span", { class: "muted" }, clock(turn.began)), h("span", {}, `${turn.prefill}${turn.prefill ? " → " : ""}${turn.decode}`), word ? h("span", { class: `chip ${REUSE[word] ?? ""}` }, word) : "", h("span", { class: `chip ${OUTCOMES[turn.outcome] ?? ""}` }, turn.running ? "running" : turn.outcome), h("span", { class: "n" }, turn.ttft_ms ? `first token ${ms(turn.ttft_ms)}` : "")),
    h("p", {}, facts.join(" · ")),
  );
}

export const summaryFacts = (detail) => {
  const { summary, reuse } = detail;
  const line = (name, value) => h("span", { class: "fact" }, h("span", {}, name), value);
  const state = summary.running ? "running" : summary.outcome;
  const talk = summary.conversation ? h("a", { class: "id", href: `#c=${encodeURIComponent(summary.conversation)}`, title: summary.conversation }, short(summary.conversation, 12)) : null;
  return [
    h("span", { class: `chip ${summary.running ? "" : OUTCOMES[summary.outcome] ?? ""}` }, state),
    line("way", h("span", {}, h("span", { class: "from" }, summary.prefill_id), summary.prefill_id ? h("span", { class: "arrow" }, "→") : "", h("span", { class: "into" }, summary.decode_id))),
    line("mode", summary.mode || "–"),
    line("first token", ms(summary.ttft_ms)),
    line("in all", ms(summary.duration_ms)),
    reuse.word ? line("reuse", `${reuse.word}, ${reuse.word === "hit" ? `${reuse.tokens} tokens ` : ""}${reuse.why}`) : null,
    talk ? line("conversation", talk) : null,
    line("request", h("span", { class: "id" }, summary.request_id || "–")),
  ].filter(Boolean);
};
