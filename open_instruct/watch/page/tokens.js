// A response's tokens, each coloured by one quantity, and everything about the token that is pointed at.

import { facts, fixed, h, isKnown, number, shown } from "./dom.js";
import { COLOURS } from "./charts.js";

export const QUANTITIES = [
  ["engine_logprob", "engine", "log-probability when the token was sampled; strong: unlikely"],
  ["learner_logprob", "learner", "the learner's log-probability before its update; strong: unlikely"],
  ["difference", "difference", "learner minus engine, in nats"],
  ["ratio", "ratio", "how much likelier the token is for the learner than it was for the engine"],
  ["correction", "correction", "importance weight of the token"],
  ["advantage", "advantage", "what the token's gradient is multiplied by"],
  ["version", "version", "the weights that sampled the token"],
  ["use", "use", "what the token is trained on for, and if not, why"],
  ["none", "plain", "no colour"],
];
const SURPRISE = 5;
const DIVERGING = { difference: 0, ratio: 1, correction: 1, advantage: 0 };
const MOST_TOKENS = 20000;

// How a quantity is coloured in this sample: {style(token) → {class, heat, colour}, legend}.
export function scaleOf(tokens, quantity) {
  if (quantity === "none") return { style: () => ({}), legend: null };
  if (quantity === "version" || quantity === "use") return categories(tokens, quantity);
  if (quantity in DIVERGING) return diverging(tokens, quantity, DIVERGING[quantity]);
  const style = (token) => (isKnown(token[quantity]) ? { class: "high", heat: Math.min(1, -token[quantity] / SURPRISE) } : { class: "unknown" });
  return { style, legend: h("div", { class: "legend" }, h("span", {}, "likely 0"), h("span", { class: "ramp one" }), h("span", {}, `−${SURPRISE} nats and less`), unknownOf(tokens, quantity)) };
}

function diverging(tokens, quantity, middle) {
  const known = tokens.map((token) => token[quantity]).filter(isKnown);
  const limit = Math.max(quantity === "difference" ? 0.01 : 0.001, ...known.map((value) => Math.abs(value - middle)));
  const style = (token) => (isKnown(token[quantity]) ? { class: token[quantity] < middle ? "low" : "high", heat: Math.abs(token[quantity] - middle) / limit } : { class: "unknown" });
  const labels = [middle - limit, middle, middle + limit].map((value) => number(value));
  return { style, legend: h("div", { class: "legend" }, h("span", {}, labels[0]), h("span", { class: "ramp two", title: `in the middle: ${labels[1]}` }), h("span", {}, labels[2]), unknownOf(tokens, quantity)) };
}

function categories(tokens, quantity) {
  const values = [...new Set(tokens.map((token) => token[quantity]))].sort((left, right) => left - right);
  const colourOf = (value) => `var(${COLOURS[values.indexOf(value) % COLOURS.length]})`;
  const nameOf = (value) => (quantity === "version" ? `version ${value}` : (tokens.find((token) => token.use === value) || {}).use_text || String(value));
  const style = (token) => ({ class: "kind", heat: 0.38, colour: colourOf(token[quantity]) });
  const entries = values.map((value) => h("span", { class: "entry" }, h("i", { class: "swatch", style: { background: colourOf(value) } }), nameOf(value), h("span", { class: "hint" }, ` ${tokens.filter((token) => token[quantity] === value).length}`)));
  return { style, legend: h("div", { class: "legend" }, entries) };
}

const unknownOf = (tokens, quantity) => tokens.some((token) => !isKnown(token[quantity])) && h("span", { class: "entry" }, h("i", { class: "swatch unknown" }), "not known");

// The tokens in their turns. Points at one → `onPoint(token, at, isPinned)`.
export function tokenText(tokens, turns, quantity, onPoint) {
  const scale = scaleOf(tokens, quantity);
  const visible = tokens.slice(0, MOST_TOKENS);
  const spans = visible.map((token, at) => tokenSpan(token, at, scale.style(token)));
  const blocks = (turns && turns.length ? turns : [{ role: "model", from: 0, to: tokens.length }]).map((turn, _, all) => turnBlock(turn, spans.slice(turn.from, turn.to), all.length));
  const box = h("div", { class: "tokens", tabindex: "0", "aria-label": "tokens of the response; j and k move" }, blocks);
  if (tokens.length > MOST_TOKENS) box.append(h("p", { class: "hint" }, `The first ${number(MOST_TOKENS)} of ${number(tokens.length)} tokens.`));
  let pinned = null;
  const point = (at, isPinned) => {
    if (isPinned) {
      if (pinned !== null) spans[pinned].classList.remove("pinned");
      pinned = at;
      if (at !== null) {
        spans[at].classList.add("pinned");
        spans[at].scrollIntoView({ block: "nearest" });
      }
    }
    if (at !== null) onPoint(tokens[at], at);
  };
  const placeOf = (event) => event.target.closest && event.target.closest("[data-at]");
  box.addEventListener("mouseover", (event) => placeOf(event) && point(Number(placeOf(event).dataset.at), false));
  box.addEventListener("mouseleave", () => pinned !== null && point(pinned, false));
  box.addEventListener("click", (event) => placeOf(event) && point(Number(placeOf(event).dataset.at), true));
  const move = (by) => point(Math.max(0, Math.min(spans.length - 1, (pinned ?? -by) + by)), true);
  const pin = (at) => at >= 0 && at < spans.length && point(at, true);
  return { element: h("div", {}, scale.legend, box), move: spans.length ? move : () => {}, pin };
}

function tokenSpan(token, at, style) {
  const span = h("span", { class: `token ${style.class || ""} ${token.use === 0 ? "" : "untrained"}`, "data-at": at });
  if (style.heat !== undefined) span.style.setProperty("--heat", `${Math.round(78 * Math.max(0, style.heat))}%`);
  if (style.colour) span.style.setProperty("--kind", style.colour);
  const parts = String(token.text).split("\n");
  parts.forEach((part, index) => {
    if (part) span.append(shown(part));
    if (index < parts.length - 1) span.append(h("span", { class: "newline", "aria-label": "new line" }, "↵"), document.createTextNode("\n"));
  });
  if (token.text === "") span.append(h("span", { class: "unseen" }, "·"));
  return span;
}

const ROLES = { model: "model", given: "tool, environment or template", thought: "thought" };

function turnBlock(turn, spans, numTurns) {
  if (numTurns === 1) return h("div", { class: "turn" }, spans);
  const isFolded = turn.role !== "model" && spans.length > 40;
  const title = h("summary", {}, h("strong", {}, ROLES[turn.role] || shown(turn.role)), h("span", { class: "hint" }, ` ${spans.length} tokens`));
  return h("details", { class: `turn ${turn.role === "model" ? "" : "aside"}`, open: !isFolded }, title, h("div", {}, spans));
}

// Everything about a token.
export function tokenFacts(token, at) {
  if (!token) return h("p", { class: "hint" }, "Point at a token, or press j and k. A click keeps it.");
  const probability = isKnown(token.engine_logprob) && token.use !== 1 ? ` (${(100 * Math.exp(token.engine_logprob)).toPrecision(3)} %)` : "";
  return h(
    "div",
    {},
    h("p", { class: "token-name" }, h("code", {}, shown(token.text.replaceAll("\n", "↵"))), h("span", { class: "hint" }, `token ${at}, id ${token.id}`)),
    h("p", { class: token.use === 0 ? "use" : "use not-trained" }, token.use === 0 ? "Trained on." : h("span", {}, "Not trained on: ", shown(token.use_text), ".")),
    facts([
      ["engine", fixed(token.engine_logprob, 4) + probability],
      ["learner", fixed(token.learner_logprob, 4)],
      ["difference", fixed(token.difference, 4)],
      ["ratio", fixed(token.ratio, 4)],
      ["correction", fixed(token.correction, 4)],
      ["advantage", fixed(token.advantage, 4)],
      ["weights", `version ${number(token.version)}${isKnown(token.age) ? `, ${token.age} behind` : ""}`],
    ]),
  );
}
