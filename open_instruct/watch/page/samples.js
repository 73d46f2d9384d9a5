// What was sampled: a step, a group side by side, a sample with its tokens, the life of a prompt, a row over time, and search.

import { change, current, go, ofRun } from "./address.js";
import { histogram } from "./charts.js";
import { ask, askRuns, isExported } from "./data.js";
import { card, chip, command, download, duration, empty, excerpt, facts, fixed, h, input, isKnown, link, many, number, segments, select, share, shown, signed, signedFixed, table, tornNotes, visible } from "./dom.js";
import { QUANTITIES, tokenFacts, tokenText } from "./tokens.js";

const PAGE_SIZE = 50;
const SORTS = [["issue", "as issued"], ["best", "best"], ["worst", "worst"], ["longest", "longest"], ["shortest", "shortest"], ["random", "random"]];
const FILTERS = ["verifier", "source", "outcome", "finish_reason", "min_reward", "max_reward", "min_age", "min_length", "max_length", "text"];
const OUTCOMES = {
  consumed: ["trained on", "good"],
  zero_std: ["all scored alike", "warn"],
  masked: ["all were cut off", "warn"],
  too_old: ["too old", "warn"],
  not_scored: ["not scored", "bad"],
  measured: ["measured", "plain"],
};

// Instead of a reference to the outcome, what the outcome means.
const LEFT_OUT = 6;
const REASONS = {
  zero_std: "of a group whose responses all scored alike, so that every advantage is 0",
  masked: "of a group whose responses were all cut off",
  too_old: "of a group that was older than the bound; its prompt was issued again",
  not_scored: "of a response that could not be used, because it, or all that it is compared with, was not scored",
};
const explained = (sample) => ({ ...sample, tokens: (sample.tokens || []).map((token) => (token.use === LEFT_OUT && REASONS[sample.outcome] ? { ...token, use_text: REASONS[sample.outcome] } : token)) });

// `isOpen`: the step that has taken the group is not trained yet.
export const outcomeChip = (outcome, isOpen = false) => (isOpen && outcome === "consumed" ? chip("not trained yet", "plain", outcome) : chip((OUTCOMES[outcome] || [outcome])[0], (OUTCOMES[outcome] || [])[1], outcome));

// Orange for the lowest reward of those shown, blue for the highest.
export function rewardChip(reward, low, high) {
  if (!isKnown(reward)) return h("span", { class: "reward unknown", title: "not scored" }, "–");
  const place = isKnown(low) && high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  const chipElement = h("span", { class: "reward", title: "reward" }, fixed(reward, 2));
  chipElement.style.setProperty("--place", `${Math.round(100 * Math.max(0, Math.min(1, place)))}%`);
  return chipElement;
}

const rangeOf = (samples) => {
  const rewards = samples.map((sample) => sample.reward).filter(isKnown);
  return rewards.length ? [Math.min(...rewards), Math.max(...rewards)] : [null, null];
};

export const groupAddress = (run, step, sample) => ofRun(run, ["step", step, sample.prompt_id], { attempt: sample.attempt || null });
export const sampleAddress = (run, step, sample, query = {}) => ofRun(run, ["step", step, sample.prompt_id, sample.sample], { attempt: sample.attempt || null, ...query });

// --- a step -------------------------------------------------------------------------------------------------------------

async function knownSteps(run) {
  const [curves, runs] = [await ask("curves", { run }), await askRuns()];
  const about = runs.find((row) => row.run === run) || {};
  return { steps: curves.step.filter((step) => step > 0), about };
}

export async function stepPage(run, parts, query) {
  const { steps, about } = await knownSteps(run);
  const step = parts.length ? Number(parts[0]) : steps.length ? steps.at(-1) : 1;
  const filters = Object.fromEntries(FILTERS.map((name) => [name, query[name]]));
  let answer;
  try {
    answer = await ask("step", { run, step, ...filters, sort: query.sort || "issue", seed: query.seed, limit: PAGE_SIZE, offset: query.offset });
  } catch (problem) {
    if (FILTERS.some((name) => query[name])) return [stepTitle(run, step, steps, null), empty("No response matches.", problem.message, " ", h("button", { type: "button", onclick: clearFilters }, "Clear the filters"))];
    if (steps.length || parts.length) return [stepTitle(run, step, steps, null), empty(`Step ${step} is not in the record.`, problem.message)];
    return [h("h1", {}, "Step"), empty("Nothing is sampled yet.", "The first scored group appears here as soon as a step takes it.")];
  }
  const isFiltered = FILTERS.some((name) => query[name]);
  const [low, high] = [answer.histogram.edges[0], answer.histogram.edges.at(-1)];
  return [
    stepTitle(run, step, steps, answer, about),
    tokenizerProblem(answer),
    stepSummary(run, answer),
    !answer.is_open && h("p", {}, link(ofRun(run, ["tokens", step]), "tokens on which engine and learner differ most")),
    h("div", { class: "columns" }, card("Rewards", answer.histogram.counts.length ? histogram(answer.histogram, rewardBin(query), chooseBin(answer)) : h("p", { class: "hint" }, "no responses")), card("Groups", outcomes(answer.counts, answer.is_open), groupTiles(run, step, answer.groups))),
    filterBar(answer, query, isFiltered),
    answer.samples.length ? sampleList(run, step, answer.samples, low, high, answer.is_open) : empty("No response matches.", isFiltered ? h("button", { type: "button", onclick: clearFilters }, "Clear the filters") : "The step has no scored group yet."),
    pager(answer, query),
    h("div", { class: "toolbar" }, answer.samples.length > 0 && h("button", { type: "button", onclick: () => exportRows(run, step, filters) }, `Export ${many(answer.num_matching, "row")} for training`), !isExported() && command(`python -m open_instruct.watch ${about.directory || "DIR"} --json step ${step}${query.sort ? ` --sort ${query.sort}` : ""}`)),
  ];
}

function stepTitle(run, step, steps, answer, about) {
  const at = steps.indexOf(step);
  const open = answer && answer.is_open;
  const target = (place) => (place >= 0 && place < steps.length ? ofRun(run, ["step", steps[place]], keptQuery()) : null);
  const before = at < 0 ? target(steps.length - 1) : target(at - 1);
  const jump = h("input", { class: "step-number", inputmode: "numeric", value: step, "aria-label": "step", onchange: (event) => go(ofRun(run, ["step", event.target.value], keptQuery())) });
  return h("div", { class: "title-row" }, h("h1", {}, "Step"), h("div", { class: "stepper" }, arrow("‹", before, "previous"), jump, arrow("›", at < 0 ? null : target(at + 1) || ofRun(run, ["step", step + 1], keptQuery()), "next")), open && chip(about.end ? "open: the run ended before it was trained" : "open: being put together", "warn"));
}

const keptQuery = () => Object.fromEntries(Object.entries(current().query).filter(([name]) => !["offset", "attempt"].includes(name)));

export const arrow = (label, target, name) => h("a", { class: "arrow", href: target, "data-arrow": name, "aria-label": name, "aria-disabled": target ? null : "true" }, label);

const outcomes = (counts, isOpen) => h("div", { class: "stack" }, Object.entries(counts || {}).map(([outcome, count]) => h("button", { type: "button", class: "row-button", onclick: () => change({ outcome: current().query.outcome === outcome ? null : outcome, offset: null }), "aria-pressed": String(current().query.outcome === outcome) }, outcomeChip(outcome, isOpen), h("b", {}, number(count)))));

export const tokenizerProblem = (answer) => answer.tokenizer_problem && h("p", { class: "notice" }, shown(answer.tokenizer_problem));

function stepSummary(run, answer) {
  const summary = answer.summary;
  if (!summary || !summary.num_groups) return null;
  const around = summary.around;
  const pairs = facts([
    ["reward", number(summary.reward)],
    isKnown(summary.standard_error) && ["its standard error", number(summary.standard_error)],
    around && [`mean of steps ${around.steps[0]} to ${around.steps.at(-1)} without this one`, number(around.mean)],
    around && ["their standard deviation", number(around.standard_deviation)],
    ["groups", number(summary.num_groups)],
    ["all right", number(summary.all_right)],
    ["all wrong", number(summary.all_wrong)],
    ["mixed", number(summary.mixed)],
    ["responses", number(answer.num_samples)],
  ]);
  return [pairs, summary.before && h("p", { class: "hint" }, summary.before.text)];
}

// A tile for each group, the fuller the more of its responses are right.
function groupTiles(run, step, groups) {
  const tile = (group) => {
    const rate = isKnown(group.num_right) && group.num_conversations ? group.num_right / group.num_conversations : null;
    const name = `${group.prompt_id}: ${isKnown(rate) ? `${group.num_right} of ${group.num_conversations} right` : `reward ${number(group.reward)}`}, ${(OUTCOMES[group.outcome] || [group.outcome])[0]}`;
    const element = h("a", { class: `tile ${group.outcome === "consumed" ? "" : "unused"}`, href: groupAddress(run, step, group), title: name, "aria-label": name }, isKnown(rate) ? h("span", {}, group.num_right) : number(group.reward, 1));
    element.style.setProperty("--place", `${Math.round(100 * (rate ?? 0.5))}%`);
    return element;
  };
  return h("div", {}, h("div", { class: "tiles" }, (groups || []).slice(0, 512).map(tile)), h("p", { class: "hint tiles-legend" }, "A tile is a group with the number of its right responses; striped: no step trains on it."));
}

const rewardBin = (query) => (query.bin ? query.bin.split("~").map(Number) : null);

// A bin is half open, as a filter by the smallest and largest reward is not: the largest is a little less than the upper edge.
function chooseBin(answer) {
  return (bin) => {
    if (bin === null) return change({ bin: null, min_reward: null, max_reward: null, offset: null });
    const [low, high] = bin;
    const isLast = high === answer.histogram.edges.at(-1);
    return change({ bin: `${low}~${high}`, min_reward: low, max_reward: isLast ? high : high - 1e-9, offset: null });
  };
}

const clearFilters = () => change({ ...Object.fromEntries(FILTERS.map((name) => [name, null])), bin: null, offset: null });

function filterBar(answer, query, isFiltered) {
  const choose = (name) => (value) => change({ [name]: value, offset: null });
  const list = (name, label) => (answer.choices[name] || []).length > 1 || query[name] ? select(label, [["", "all"], ...answer.choices[name].map((value) => [value, value])], query[name], choose(name)) : null;
  const small = (name, label) => input(label, query[name], choose(name), { inputmode: "decimal", class: "small" });
  const more = h("details", { class: "filters", open: ["min_age", "min_length", "max_length", "min_reward", "max_reward"].some((name) => query[name] && !query.bin) }, h("summary", {}, "more filters"), h("div", { class: "toolbar" }, small("min_reward", "reward ≥"), small("max_reward", "reward ≤"), small("min_length", "tokens ≥"), small("max_length", "tokens ≤"), small("min_age", "age ≥")));
  return h(
    "div",
    { class: "filter-bar" },
    h("div", { class: "toolbar" }, segments("order", SORTS, query.sort || "issue", (sort) => change({ sort: sort === "issue" ? null : sort, seed: sort === "random" ? Math.floor(1e6 * Math.random()) : null, offset: null }))),
    h("div", { class: "toolbar" }, list("verifier", "verifier"), list("source", "source"), list("outcome", "outcome"), list("finish_reason", "ended by"), input("text", query.text, choose("text"), { type: "search", placeholder: "contains" }), isFiltered && h("button", { type: "button", onclick: clearFilters }, "clear filters")),
    more,
    h("p", { class: "hint", "aria-live": "polite" }, many(answer.num_matching, "response"), isFiltered ? " match" : ""),
  );
}

export function sampleList(run, step, samples, low, high, isOpen = false) {
  return h("ol", { class: "samples" }, samples.map((sample) => sampleItem(run, sample.step ?? step, sample, low, high, isOpen)));
}

function sampleItem(run, step, sample, low, high, isOpen) {
  const about = [shown(sample.prompt_id), `sample ${sample.sample}`, turnOf(sample), many(sample.num_tokens, "token"), shown(sample.finish_reason), isKnown(sample.age) && `${sample.age} behind`, isKnown(sample.advantage) && `advantage ${signedFixed(sample.advantage)}`].filter(Boolean);
  const meta = about.flatMap((part, at) => (at ? [" · ", part] : [part]));
  return h(
    "li",
    {},
    h("a", { class: "sample-item", href: sampleAddress(run, step, sample) }, rewardChip(sample.reward, low, high), h("span", { class: "sample-main" }, h("span", { class: "sample-text" }, sample.text ? excerpt(sample.text, 220) : h("i", { class: "hint" }, "empty")), h("span", { class: "meta" }, meta, verdictMarks(sample.verdicts))), h("span", { class: "sample-outcome" }, sample.outcome && outcomeChip(sample.outcome, isOpen))),
    h("a", { class: "side-link", href: groupAddress(run, step, sample), title: "its group side by side" }, "group"),
  );
}

// Of a workflow with several kinds of turns, such as `reasoning 2`.
const turnOf = (sample) => (sample.kind ? visible(`${sample.kind} ${sample.number || ""}`.trim()) : null);

const verdictMarks = (verdicts) => (verdicts || []).length > 1 && verdicts.map((verdict) => h("span", { class: "pair" }, " · ", shown(verdict.name), " ", h("b", {}, isKnown(verdict.score) ? number(verdict.score, 2) : "not scored")));

function pager(answer, query) {
  const offset = Number(query.offset || 0);
  if (answer.num_matching <= PAGE_SIZE) return null;
  const to = (place) => (place < 0 || place >= answer.num_matching ? null : ofRun(current().parts[1], current().parts.slice(2), { ...current().query, offset: place || null }));
  return h("div", { class: "pager" }, arrow("‹", to(offset - PAGE_SIZE), "earlier ones"), `${offset + 1}–${Math.min(offset + PAGE_SIZE, answer.num_matching)} of ${number(answer.num_matching)}`, arrow("›", to(offset + PAGE_SIZE), "later ones"));
}

async function exportRows(run, step, filters) {
  const answer = await ask("export_rows", { run, step, ...filters });
  const rows = Array.isArray(answer) ? answer : answer.rows;
  download(`step_${step}.jsonl`, rows.map((row) => JSON.stringify(row) + "\n").join(""));
}

// --- a group ------------------------------------------------------------------------------------------------------------

async function neighbours(run, step, promptId) {
  const { groups } = await ask("step", { run, step, limit: 1 });
  const at = groups.findIndex((sample) => sample.prompt_id === promptId);
  return [groups[at - 1], groups[at + 1]].map((sample) => (sample ? groupAddress(run, step, sample) : null));
}

export const crumbs = (...parts) => h("nav", { class: "crumbs", "aria-label": "place" }, parts.flatMap((part, at) => (at ? [h("span", {}, "/"), part] : [part])));

export async function groupPage(run, parts, query) {
  const [step, promptId] = [Number(parts[0]), parts[1]];
  const group = await ask("group", { run, step, prompt_id: promptId, attempt: query.attempt });
  const [before, after] = await neighbours(run, step, promptId);
  const title = h("div", { class: "title-row" }, h("h1", {}, shown(promptId)), h("div", { class: "stepper" }, arrow("‹", before, "previous"), arrow("›", after, "next")), outcomeChip(group.outcome));
  return [crumbs(link(ofRun(run, ["step", step]), `step ${step}`), "group"), title, promptCard(run, group), answers(run, group, (sample) => sampleAddress(run, step, { ...sample, prompt_id: promptId, attempt: query.attempt }))];
}

// Of a row of a generated data set the answer, and all else to be unfolded.
function truth(text) {
  let answer;
  try {
    answer = JSON.parse(text).answer;
  } catch {
    // the truth is a text
  }
  return typeof answer === "string" || typeof answer === "number" ? [shown(answer), h("details", { class: "truth" }, h("summary", {}, "all that its verifier gets"), shown(text))] : shown(text);
}

function promptCard(run, group, isTraining = true) {
  return card(
    null,
    h("details", { class: "prompt", open: (group.prompt_text || "").length < 1200 }, h("summary", {}, "Prompt"), h("pre", { class: "text" }, shown(group.prompt_text))),
    facts([["ground truth", group.ground_truth === null ? "–" : truth(group.ground_truth)], ["row", isKnown(group.row) ? (isTraining ? link(ofRun(run, ["row", group.row]), shown(group.row)) : shown(group.row)) : null], ["source", isKnown(group.source) ? shown(group.source) : null], isTraining && ["its life", link(ofRun(run, ["why", group.prompt_id]), "why?")]]),
  );
}

export function answers(run, group, addressOf) {
  const [low, high] = rangeOf(group.samples);
  return h("div", { class: "answers" }, group.samples.map((sample) => answer(sample, low, high, addressOf(sample))));
}

function answer(sample, low, high, target) {
  const ending = sample.finish_reason === "length" ? chip("cut off", "warn") : sample.finish_reason && sample.finish_reason !== "stop" ? chip(sample.finish_reason, "bad") : null;
  return h(
    "article",
    { class: "answer" },
    h("header", {}, h("a", { href: target }, h("b", {}, `#${sample.sample}`)), rewardChip(sample.reward, low, high), turnOf(sample) && h("span", { class: "meta" }, turnOf(sample)), isKnown(sample.advantage) && h("span", { class: "meta" }, `advantage ${signedFixed(sample.advantage)}`), h("span", { class: "meta push" }, many(sample.num_tokens, "token")), ending),
    h("div", { class: "text" }, parted(sample.text, sample.parts_at)),
    verdictList(sample.verdicts, sample.environment_reward),
  );
}

// The beginning that all answers share is faint.
function parted(text, partsAt) {
  if (!text) return h("i", { class: "hint" }, "empty");
  if (!partsAt) return shown(text);
  return [shown(text.slice(0, partsAt), "shared"), shown(text.slice(partsAt))];
}

function verdictList(verdicts, environmentReward) {
  const rows = (verdicts || []).map((verdict) => h("div", { class: "verdict" }, h("span", {}, shown(verdict.name), isKnown(verdict.weight) && verdict.weight !== 1 && h("span", { class: "hint" }, ` × ${number(verdict.weight, 2)}`)), h("span", { class: "meter" }, meter(verdict.score)), h("b", {}, isKnown(verdict.score) ? number(verdict.score, 2) : "not scored"), !isKnown(verdict.score) && isKnown(verdict.reasoning) && h("span", { class: "hint why-not" }, shown(verdict.reasoning))));
  if (isKnown(environmentReward)) rows.push(h("div", { class: "verdict" }, h("span", {}, "environment"), h("span", {}), h("b", {}, number(environmentReward, 2))));
  return rows.length > 0 && h("footer", {}, rows);
}

function meter(score) {
  const fill = h("i", {});
  fill.style.setProperty("width", `${100 * Math.max(0, Math.min(1, score || 0))}%`);
  return fill;
}

// --- a sample -----------------------------------------------------------------------------------------------------------

export async function samplePage(run, parts, query) {
  const [step, promptId, sampleNumber] = [Number(parts[0]), parts[1], Number(parts[2])];
  const [sample, group] = [explained(await ask("sample", { run, step, prompt_id: promptId, sample: sampleNumber, attempt: query.attempt })), await ask("group", { run, step, prompt_id: promptId, attempt: query.attempt })];
  const numbers = group.samples.map((entry) => entry.sample);
  const at = numbers.indexOf(sampleNumber);
  const target = (place) => (place >= 0 && place < numbers.length ? sampleAddress(run, step, { prompt_id: promptId, sample: numbers[place], attempt: query.attempt }, { colour: query.colour }) : null);
  const place = crumbs(link(ofRun(run, ["step", step]), `step ${step}`), link(ofRun(run, ["step", step, promptId], { attempt: query.attempt }), shown(promptId)), `sample ${sampleNumber}`);
  return [place, sampleTitle(sampleNumber, target(at - 1), target(at + 1), sample), tokenView(sample, query), sampleFacts(sample), promptCard(run, { ...group, ...sample, prompt_id: promptId }), spelled(sample)];
}

function sampleTitle(sampleNumber, before, after, sample) {
  return h("div", { class: "title-row" }, h("h1", {}, `Sample ${sampleNumber}`), h("div", { class: "stepper" }, arrow("‹", before, "previous"), arrow("›", after, "next")), turnOf(sample) && chip(turnOf(sample), "plain", "kind and number of the turn"), rewardChip(sample.reward), sample.outcome && outcomeChip(sample.outcome));
}

export function tokenView(sample, query) {
  const tokens = sample.tokens || [];
  const known = QUANTITIES.filter(([name]) => name === "none" || tokens.some((token) => isKnown(token[name])));
  const quantity = known.some(([name]) => name === query.colour) ? query.colour : known.some(([name]) => name === "difference") ? "difference" : "engine_logprob";
  const detail = h("aside", { class: "token-detail", "aria-live": "polite" }, tokenFacts(null));
  const view = tokenText(tokens, sample.turns, quantity, (token, at) => detail.replaceChildren(tokenFacts(token, at)));
  view.element.tokenMove = view.move;
  if (isKnown(query.token)) requestAnimationFrame(() => view.pin(Number(query.token)));
  view.element.classList.add("token-view");
  return h("section", { class: "card token-card" }, h("div", { class: "toolbar" }, segments("colour", known, quantity, (colour) => change({ colour }))), h("div", { class: "token-columns" }, view.element, detail), tokens.length === 0 && h("p", { class: "hint" }, isExported() && sample.text ? "Its tokens are not in this file. To see them, open the run where its files are, with python -m open_instruct.watch." : "The response has no tokens."));
}

function sampleFacts(sample) {
  const uses = new Map();
  for (const token of sample.tokens || []) uses.set(token.use_text, (uses.get(token.use_text) || 0) + 1);
  const rows = sample.verdicts || [];
  const columns = [
    { title: "scored by", cell: (verdict) => shown(verdict.name) },
    { title: "score", number: true, cell: (verdict) => (isKnown(verdict.score) ? number(verdict.score) : "not scored") },
    { title: "weight", number: true, cell: (verdict) => number(verdict.weight, 2) },
    { title: "has read", class: "wide", cell: (verdict) => (isKnown(verdict.read) ? shown(verdict.read) : "–") },
    { title: "reasoning", class: "wide", cell: (verdict) => (isKnown(verdict.reasoning) ? shown(verdict.reasoning) : "–") },
    { title: "seconds", number: true, cell: (verdict) => number(verdict.seconds) },
  ];
  const pairs = [
    ["reward", number(sample.reward)],
    ["score", number(sample.score)],
    ["advantage", signed(sample.advantage)],
    ["environment", isKnown(sample.environment_reward) ? number(sample.environment_reward) : null],
    ["ended by", isKnown(sample.finish_reason) ? shown(sample.finish_reason) : null],
    ["tokens", number((sample.tokens || []).length)],
    ["engine", isKnown(sample.engine) ? number(sample.engine) : null],
    ["generation", isKnown(sample.generation_s) ? duration(sample.generation_s) : null],
    ...[...uses].map(([use, count]) => [shown(use), many(count, "token")]),
  ];
  return card("Worth and use", facts(pairs), rows.length > 0 && table(columns, rows, { label: "verdicts" }));
}

const spelled = (sample) => (sample.prompt_tokens || []).length > 0 && h("details", { class: "card" }, h("summary", {}, `The prompt's ${many(sample.prompt_tokens.length, "token")}`), h("div", { class: "tokens spelled" }, sample.prompt_tokens.map((text) => h("span", { class: "token" }, shown(text)))));

// --- why, and a row over time ---------------------------------------------------------------------------------------------

export async function whyPage(run, parts) {
  if (!parts.length) return [h("h1", {}, "Why?"), h("p", { class: "lead" }, "The life of a prompt: when it was issued, who sampled and scored it, and what became of it."), h("div", { class: "toolbar" }, input("prompt", "", (value) => go(ofRun(run, ["why", value.trim()])), { placeholder: "train-17" }))];
  const answer = await ask("why", { run, prompt_id: parts[0] });
  const columns = [
    { title: "attempt", number: true, cell: (row) => number(row.attempt) },
    { title: "step", number: true, cell: (row) => link(ofRun(run, ["step", row.step, answer.prompt_id], { attempt: row.attempt || null }), number(row.step)) },
    { title: "outcome", cell: (row) => outcomeChip(row.outcome) },
    { title: "rewards", cell: (row) => rewardRow(row.rewards) },
  ];
  return [h("h1", {}, "Why? ", shown(answer.prompt_id)), tornNotes(answer), card(null, h("div", { class: "sentences" }, answer.sentences.map((sentence) => h("p", {}, shown(sentence)))), isKnown(answer.row) && h("p", {}, link(ofRun(run, ["row", answer.row]), "The same row over time"))), answer.attempts.length > 0 && card("Attempts", table(columns, answer.attempts, { label: "attempts" }))];
}

function rewardRow(rewards) {
  const [low, high] = rangeOf(rewards.map((reward) => ({ reward })));
  return h("span", { class: "rewards" }, rewards.map((reward) => rewardChip(reward, Math.min(0, low ?? 0), Math.max(0, high ?? 0))));
}

const VERDICTS = { "mostly right": "good", forgotten: "bad", "never right": "bad", mixed: "warn", once: "plain" };

export async function rowPage(run, parts) {
  const answer = await ask("row", { run, row: parts[0] });
  const groups = answer.groups.map((group) => rowGroup(group, link(ofRun(run, ["step", group.step, group.prompt_id], { attempt: group.attempt || null }), h("b", {}, `step ${group.step}`))));
  const evaluations = (answer.evaluations || []).map((group) => rowGroup(group, link(ofRun(run, ["evaluation", group.set, group.version]), h("b", {}, shown(group.set), ` at version ${group.version}`))));
  return [
    crumbs(link(ofRun(run, ["search"]), "search"), "a row over time"),
    h("div", { class: "title-row" }, h("h1", {}, shown(answer.row)), chip(answer.verdict, VERDICTS[answer.verdict])),
    tornNotes(answer),
    facts([["ground truth", isKnown(answer.ground_truth) ? truth(answer.ground_truth) : "–"], ["source", isKnown(answer.source) ? shown(answer.source) : null], ["sampled", many(answer.groups.length, "time")], ["evaluated", evaluations.length ? many(evaluations.length, "time") : null]]),
    groups,
    evaluations.length > 0 && [h("h2", {}, "Evaluations"), evaluations],
  ];
}

function rowGroup(group, place) {
  const [low, high] = rangeOf((group.rewards || []).map((reward) => ({ reward })));
  const answers = (group.texts || []).map((text, at) => h("div", { class: "row-answer" }, rewardChip((group.rewards || [])[at], Math.min(0, low ?? 0), Math.max(0, high ?? 0)), h("span", {}, excerpt(text, 200))));
  const rate = isKnown(group.share) && h("span", { class: "push" }, h("b", {}, share(group.share, 0)), h("span", { class: "hint" }, " right"));
  return h("article", { class: "card" }, h("div", { class: "title-row small" }, place, h("span", { class: "meta" }, shown(group.prompt_id), isKnown(group.version) && ` · version ${group.version}`), group.outcome && outcomeChip(group.outcome), rate), answers);
}

// --- search ---------------------------------------------------------------------------------------------------------------

export async function searchPage(run, _, query) {
  const text = (query.text || "").trim();
  const title = h("h1", {}, "Search");
  const field = h("div", { class: "toolbar" }, h("input", { type: "search", class: "wide-input", value: text, placeholder: "text of a response, or a prompt such as train-17", "aria-label": "search", onchange: (event) => change({ text: event.target.value }) }));
  if (!text) return [title, field];
  if (/^[a-z_]+-\d+$/i.test(text)) return go(ofRun(run, ["why", text]));
  const answer = await ask("search", { run, text, limit: 100 });
  const samples = Array.isArray(answer) ? answer : answer.samples;
  const [low, high] = rangeOf(samples);
  return [title, field, tornNotes(answer), h("p", { class: "hint" }, `${many(samples.length, "response")} with “`, shown(text), "”, the newest steps first."), samples.length ? sampleList(run, null, samples, low, high) : empty("No response has this text.", "The search reads the newest steps.")];
}

// --- evaluations as samples -------------------------------------------------------------------------------------------------

export async function evaluationPage(run, parts, query) {
  const [set, version] = [parts[0], Number(parts[1])];
  const here = ["evaluation", set, version];
  if (parts.length >= 4) {
    const sample = await ask("evaluation_sample", { run, version, set, prompt_id: parts[2], sample: parts[3] });
    return [crumbs(link(ofRun(run, ["evaluations"]), "evaluations"), link(ofRun(run, here), shown(set), ` v${version}`), shown(parts[2])), sampleTitle(parts[3], null, null, sample), tokenView(sample, query), sampleFacts(sample), promptCard(run, { ...sample, prompt_id: parts[2] }, false)];
  }
  const answer = await ask("evaluation", { run, version, set, limit: PAGE_SIZE, offset: query.offset });
  const [low, high] = rangeOf(answer.items.flatMap((item) => item.samples));
  const items = answer.items.map((item) => evaluationItem(run, item, (sample) => ofRun(run, [...here, item.prompt_id, sample.sample]), low, high));
  return [crumbs(link(ofRun(run, ["evaluations"]), "evaluations"), shown(set)), h("h1", {}, shown(set), ` at version ${version}`), h("p", { class: "lead" }, many(answer.num_items, "item")), tokenizerProblem(answer), items, pager({ num_matching: answer.num_items }, query)];
}

function evaluationItem(run, item, addressOf, low, high) {
  const samples = item.samples.map((sample) => h("a", { class: "row-answer", href: addressOf(sample) }, rewardChip(sample.reward, low, high), h("span", { class: "plain" }, sample.text ? excerpt(sample.text, 240) : h("i", { class: "hint" }, "empty"))));
  const place = isKnown(item.row) ? link(ofRun(run, ["row", item.row]), shown(item.row)) : shown(item.prompt_id);
  return h("article", { class: "card" }, h("div", { class: "title-row small" }, h("b", {}, place), h("span", { class: "meta" }, "truth ", isKnown(item.ground_truth) ? shown(item.ground_truth) : "–")), h("p", { class: "hint" }, excerpt(item.prompt_text, 240)), samples);
}

// --- tokens of a step on which engine and learner differ most ---------------------------------------------------------------

// A token with its spaces and line ends as signs, because else nobody sees them.
function spaced(text) {
  const parts = String(text ?? "").split(/([ \n\t])/).filter(Boolean);
  const SIGNS = { " ": "␣", "\n": "↵", "\t": "⇥" };
  return parts.map((part) => (SIGNS[part] ? h("span", { class: "hint" }, SIGNS[part]) : shown(part)));
}

export async function tokensPage(run, parts) {
  const step = Number(parts[0]);
  const answer = await ask("tokens", { run, step, limit: 50 });
  const columns = [
    { title: "token", cell: (row) => h("code", { class: "token-text", title: row.text }, spaced(row.text)) },
    { title: "difference", number: true, cell: (row) => h("b", {}, signed(row.difference, 4)) },
    { title: "engine", number: true, cell: (row) => fixed(row.engine_logprob, 4) },
    { title: "learner", number: true, cell: (row) => fixed(row.learner_logprob, 4) },
    { title: "ratio", number: true, cell: (row) => fixed(row.ratio, 3) },
    { title: "version", number: true, cell: (row) => number(row.version) },
    { title: "of", class: "wide", cell: (row) => link(sampleAddress(run, step, row, { colour: "difference", token: row.at }), shown(row.prompt_id), `, sample ${row.sample}, token ${row.at}`) },
  ];
  return [
    crumbs(link(ofRun(run, ["step", step]), `step ${step}`), "tokens"),
    h("h1", {}, "Largest differences"),
    h("p", { class: "lead" }, "Trained tokens on which the log-probabilities of engine and learner differ most."),
    tokenizerProblem(answer),
    facts([["trained tokens", number(answer.num_tokens)], ["mean |difference|", fixed(answer.mean, 5)], ["largest", fixed(answer.max, 4)]]),
    answer.tokens.length ? table(columns, answer.tokens, { label: "tokens" }) : empty("No token is trained on in this step."),
  ];
}
