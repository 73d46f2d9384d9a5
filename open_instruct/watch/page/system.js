// The run as a machine: lanes over time, staleness, health, evaluations, cost.

import { change, ofRun } from "./address.js";
import { COLOURS, chart, svg } from "./charts.js";
import { ask, askModel, askRuns, isExported } from "./data.js";
import { card, chip, clock, command, duration, empty, excerpt, facts, h, isKnown, large, link, many, middle, number, segments, select, share, shown, table, tornNotes } from "./dom.js";
import { crumbs, outcomeChip } from "./samples.js";

// --- lanes ------------------------------------------------------------------------------------------------------------

const SPAN_COLOURS = { queue: "--grey", turn: "--blue", tool: "--green", environment: "--yellow", generate: "--blue", wait: "--line-strong", verify: "--sky", train: "--orange", sync: "--purple", sleep: "--yellow", checkpoint: "--green" };
const spanColour = (kind) => SPAN_COLOURS[kind] || "--grey";
const WINDOW = 20;
const LANE_HEIGHT = 30;
const MOST_SPANS = 4000;

export async function lanesPage(run, parts, query) {
  if (parts[0] !== undefined) return conversationsPage(run, parts[0], query);
  const curves = await ask("curves", { run });
  const steps = curves.step.filter((step) => step > 0);
  const last = steps.at(-1) || 0;
  const from = isKnown(query.from) ? Number(query.from) : Math.max(steps[0] || 0, last - WINDOW + 1);
  const to = isKnown(query.to) ? Number(query.to) : last;
  const title = h("h1", {}, "Lanes");
  const answer = steps.length ? await ask("lanes", { run, from_step: from, to_step: to }) : { lanes: [] };
  if (!answer.lanes.length || !isKnown(answer.began)) return [title, empty("No lane yet.", "Lanes begin when the run's first step is trained.")];
  const at = isKnown(query.at) ? Number(query.at) : answer.began + 0.5 * (answer.ended - answer.began);
  const kinds = [...new Set(answer.lanes.flatMap((lane) => lane.spans.map((span) => span.kind)))];
  const legend = h("div", { class: "legend" }, kinds.map((kind) => h("span", { class: "entry" }, h("i", { class: "swatch", style: { background: `var(${spanColour(kind)})` } }), kind)));
  const moment = h("div", { class: "moment" });
  const picture = lanePicture(answer, (unix) => show(unix));
  const slider = h("input", { type: "range", min: "0", max: "1000", value: Math.round((1000 * (at - answer.began)) / (answer.ended - answer.began || 1)), "aria-label": "time", oninput: (event) => show(answer.began + (event.target.value / 1000) * (answer.ended - answer.began)), onchange: () => change({ at: shownAt.toFixed(3) }, true) });
  let shownAt = at;
  function show(unix) {
    shownAt = unix;
    picture.setAt(unix);
    slider.value = Math.round((1000 * (unix - answer.began)) / (answer.ended - answer.began || 1));
    moment.replaceChildren(h("p", {}, h("b", {}, clock(unix, true)), h("span", { class: "hint" }, `  ${duration(unix - answer.began)} after the beginning of this window`)), momentTable(answer, unix));
  }
  show(at);
  return [
    title,
    h("p", { class: "lead" }, "What engines, learners and driver did over time. Move the slider to see one moment."),
    tornNotes(answer),
    stepWindow(answer.from_step ?? from, answer.to_step ?? to, steps[0] || 0, last),
    h("p", { class: "hint" }, link(ofRun(run, ["lanes", answer.to_step ?? to]), `Conversations of step ${answer.to_step ?? to}`), ": queue, turns, tools and environment of each prompt."),
    h("section", { class: "card" }, legend, h("div", { class: "lane-box" }, picture.element), h("div", { class: "lane-slider" }, slider), moment),
    card("Idle", table([{ title: "lane", class: "nowrap", cell: (lane) => shown(lane.name) }, { title: "idle", number: true, cell: (lane) => share(lane.idle_share) }, { title: "", class: "wide", cell: (lane) => shareBar(lane.idle_share) }], answer.lanes, { label: "idle time" })),
  ];
}

const PAGE_OF_LANES = 40;

async function conversationsPage(run, step, query) {
  const offset = Number(query.offset || 0);
  const answer = await ask("conversations", { run, step, limit: PAGE_OF_LANES, offset: offset || null });
  const lanes = answer.lanes.map((lane) => ({ ...lane, name: `${lane.prompt_id}${lane.attempt ? ` (attempt ${lane.attempt})` : ""}` }));
  const whole = { ...answer, lanes };
  const kinds = Object.keys(answer.mean_seconds);
  const moment = h("div", { class: "moment" });
  const picture = lanePicture(whole, (unix) => show(unix), (lane) => ofRun(run, ["why", lane.prompt_id]));
  const slider = h("input", { type: "range", min: "0", max: "1000", value: 500, "aria-label": "time", oninput: (event) => show(answer.began + (event.target.value / 1000) * (answer.ended - answer.began)) });
  function show(unix) {
    picture.setAt(unix);
    slider.value = Math.round((1000 * (unix - answer.began)) / (answer.ended - answer.began || 1));
    moment.replaceChildren(h("p", {}, h("b", {}, clock(unix, true))), momentTable(whole, unix));
  }
  show((answer.began + answer.ended) / 2);
  const columns = [
    { title: "prompt", class: "nowrap", cell: (lane) => link(ofRun(run, ["why", lane.prompt_id]), shown(lane.name)) },
    ...kinds.map((kind) => ({ title: kind, number: true, cell: (lane) => (lane.seconds[kind] ? duration(lane.seconds[kind]) : "–") })),
    { title: "became", cell: (lane) => outcomeChip(lane.outcome) },
  ];
  const more = (by) => change({ offset: Math.max(0, offset + by) || null });
  return [
    crumbs(link(ofRun(run, ["lanes"]), "lanes"), `conversations of step ${answer.step}`),
    h("h1", {}, `Conversations of step ${answer.step}`),
    h("p", { class: "lead" }, "A lane for each prompt: from its issue until its step took it. All its responses are in one lane."),
    answer.num_groups > PAGE_OF_LANES && h("div", { class: "toolbar" }, h("button", { type: "button", disabled: offset === 0, onclick: () => more(-PAGE_OF_LANES) }, "earlier"), h("span", { class: "hint" }, `${offset + 1} to ${offset + lanes.length} of ${answer.num_groups}`), h("button", { type: "button", disabled: offset + lanes.length >= answer.num_groups, onclick: () => more(PAGE_OF_LANES) }, "later")),
    h("section", { class: "card" }, h("div", { class: "legend" }, kinds.map((kind) => h("span", { class: "entry" }, h("i", { class: "swatch", style: { background: `var(${spanColour(kind)})` } }), `${kind}: mean ${duration(answer.mean_seconds[kind])}`))), h("div", { class: "lane-box" }, picture.element), h("div", { class: "lane-slider" }, slider), moment),
    card("Seconds", table(columns, lanes, { label: "seconds of each prompt" })),
  ];
}

function stepWindow(from, to, first, last) {
  const width = Math.max(1, to - from + 1);
  const move = (by) => change({ from: Math.max(first, Math.min(last - width + 1, from + by)), to: Math.max(first + width - 1, Math.min(last, to + by)), at: null });
  const box = (label, value, name) => h("label", { class: "field inline" }, h("span", {}, label), h("input", { class: "step-number", inputmode: "numeric", value, onchange: (event) => change({ [name]: event.target.value, at: null }) }));
  return h("div", { class: "toolbar" }, box("from step", from, "from"), box("to step", to, "to"), h("button", { type: "button", onclick: () => move(-width), disabled: from <= first }, "earlier"), h("button", { type: "button", onclick: () => move(width), disabled: to >= last }, "later"), !isExported() && h("button", { type: "button", onclick: () => change({ from: first, to: last, at: null }) }, "whole run"));
}

function shareBar(value) {
  const fill = h("i", {});
  fill.style.setProperty("width", `${100 * Math.max(0, Math.min(1, value || 0))}%`);
  return h("span", { class: "meter long" }, fill);
}

function lanePicture(answer, onPick, addressOf = null) {
  const [width, began, ended] = [1000, answer.began, answer.ended];
  const place = (unix) => (width * Math.max(0, Math.min(1, (unix - began) / (ended - began || 1))));
  const height = LANE_HEIGHT * answer.lanes.length;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "lanes", role: "img", "aria-label": "lanes over time" });
  answer.lanes.forEach((lane, row) => {
    for (const span of lane.spans.slice(0, MOST_SPANS)) {
      const [x, end] = [place(span.began), place(span.ended)];
      const block = svg("rect", { x, y: row * LANE_HEIGHT + 4, width: Math.max(0.6, end - x), height: LANE_HEIGHT - 8 });
      block.style.setProperty("fill", `var(${spanColour(span.kind)})`);
      const title = svg("title");
      title.textContent = `${span.kind}, ${duration(span.ended - span.began)}: ${span.text || ""}`;
      block.append(title);
      picture.append(block);
    }
  });
  const line = svg("line", { y1: 0, y2: height, class: "now" });
  picture.append(line);
  picture.style.setProperty("height", `${height}px`);
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    onPick(began + ((event.clientX - box.left) / box.width) * (ended - began));
  });
  const names = h("div", { class: "lane-names" }, answer.lanes.map((lane) => h("div", { style: { height: `${LANE_HEIGHT}px` } }, addressOf ? link(addressOf(lane), shown(lane.name)) : shown(lane.name))));
  const times = h("div", { class: "lane-times" }, h("span", {}, clock(began)), h("span", {}, clock((began + ended) / 2)), h("span", {}, clock(ended)));
  const setAt = (unix) => ["x1", "x2"].forEach((name) => line.setAttribute(name, place(unix)));
  return { element: [names, h("div", {}, picture, times)], setAt };
}

function momentTable(answer, unix) {
  const columns = [
    { title: "lane", class: "nowrap", cell: ([lane]) => shown(lane.name) },
    { title: "does", cell: ([, span]) => (span ? h("span", { class: "pair" }, h("i", { class: "swatch", style: { background: `var(${spanColour(span.kind)})` } }), span.kind) : h("span", { class: "hint" }, "idle")) },
    { title: "since", number: true, cell: ([, span]) => (span ? duration(unix - span.began) : "–") },
    { title: "of", number: true, cell: ([, span]) => (span ? duration(span.ended - span.began) : "–") },
    { title: "", class: "wide", cell: ([, span, more]) => (span ? [shown(span.text), more ? ` and ${more} more` : ""] : "") },
  ];
  // What a lane does several times at once, such as the turns of its responses, is a row with the longest of them.
  const rows = answer.lanes.flatMap((lane) => {
    const spans = lane.spans.filter((span) => span.began <= unix && unix < span.ended);
    const kinds = [...new Set(spans.map((span) => span.kind))];
    if (!kinds.length) return [[lane, null]];
    return kinds.map((kind) => {
      const own = spans.filter((span) => span.kind === kind).sort((left, right) => left.began - right.began);
      return [lane, own[0], own.length - 1];
    });
  });
  return table(columns, rows, { label: "at this moment" });
}

// --- staleness ----------------------------------------------------------------------------------------------------------

export async function stalenessPage(run, parts) {
  const answer = await ask("staleness", { run, step: parts[0] }).catch(() => ({ steps: [] }));
  const title = h("div", { class: "title-row" }, h("h1", {}, "Staleness"), isKnown(answer.bound) && chip(`bound ${answer.bound}`, "plain", "the oldest weights that a step may be trained on, in steps"));
  if (!answer.steps.length) return [title, empty("No step is trained yet.", "Ages appear with the first step.")];
  const lines = [
    { name: "mean", x: answer.steps, y: answer.mean_age, steps: answer.steps, colour: "--blue" },
    { name: "oldest", x: answer.steps, y: answer.max_age, steps: answer.steps, colour: "--orange" },
    isKnown(answer.bound) && { name: "bound", x: answer.steps, y: answer.steps.map(() => answer.bound), steps: answer.steps, colour: "--vermillion" },
  ].filter(Boolean);
  const legend = h("div", { class: "legend" }, lines.map((line) => h("span", { class: "entry" }, h("i", { class: "swatch", style: { background: `var(${line.colour})` } }), line.name)));
  const step = answer.step ?? parts[0] ?? answer.steps.at(-1);
  return [
    title,
    h("p", { class: "lead" }, "How many versions the weights had moved on when a step trained on a token. Click on a step to see its versions."),
    h("section", { class: "card" }, legend, chart(lines, { title: "age in versions", xName: "step", height: 240, group: "ages", onPick: (picked) => isKnown(picked) && (location.hash = ofRun(run, ["staleness", picked])) })),
    h("div", { class: "columns" }, card(`Tokens of step ${step} by version`, bars(answer.by_version, (version) => `version ${version}`, "token"), isKnown(answer.num_of_several_versions) && h("p", { class: "hint" }, `${number(answer.num_of_several_versions)} of ${many(answer.num_responses, "response")} have tokens of several versions.`)), card(`Step ${step}: age of keys and values`, bars(answer.kv_age, (age) => `${age} behind`, "response"))),
  ];
}

// Counts by name as horizontal bars.
function bars(counts, nameOf, noun) {
  const entries = Object.entries(counts || {});
  if (!entries.length) return h("p", { class: "hint" }, "Not known.");
  const sum = entries.reduce((total, [, count]) => total + count, 0) || 1;
  return h("div", { class: "bars" }, entries.map(([name, count]) => h("div", { class: "bar-row" }, h("span", {}, shown(nameOf(name))), shareBar(count / sum), h("b", { title: many(count, noun) }, large(count)), h("span", { class: "hint" }, share(count / sum)))));
}

// --- health -------------------------------------------------------------------------------------------------------------

// Only addresses that lead to pages: what a rule of a user gives is not run.
function safeLink(target) {
  const text = String(target || "");
  return /^https?:\/\//.test(text) || text.startsWith("#/") ? h("a", { href: text, rel: "noreferrer noopener" }, "read on") : text ? h("code", {}, shown(text)) : null;
}

export async function healthPage(run) {
  const answer = await ask("health", { run });
  const alarms = answer.alarms || [];
  const list = alarms.map((alarm) =>
    h("article", { class: "card alarm" }, h("div", { class: "title-row small" }, chip(alarm.rule, "bad"), isKnown(alarm.step) && link(ofRun(run, ["step", alarm.step]), `step ${alarm.step}`)), h("p", {}, shown(alarm.text)), alarm.cure && h("p", { class: "cure" }, shown(alarm.cure)), h("p", { class: "meta" }, alarm.metric && link(ofRun(run, ["curves"], { names: alarm.metric }), shown(alarm.metric)), " ", safeLink(alarm.link))));
  const rules = [
    { title: "rule", cell: (rule) => h("code", {}, rule.name) },
    { title: "alarm when", class: "wide", cell: (rule) => shown(rule.fires_when || rule.text) },
  ];
  const warnings = [
    { title: "when", cell: (row) => h("span", { class: "nowrap" }, clock(row.unix, true)) },
    { title: "level", cell: (row) => chip(row.level || "warning", ["ERROR", "CRITICAL"].includes(row.level) ? "bad" : "warn") },
    { title: "", class: "wide", cell: (row) => shown(row.text, "lines") },
  ];
  return [
    h("h1", {}, "Health"),
    alarms.length ? list : empty("No alarm.", (answer.rules || []).length ? `None of ${many(answer.rules.length, "rule")} found anything.` : "No rule is installed."),
    (answer.warnings || []).length > 0 && card("Warnings of the log", table(warnings, [...answer.warnings].reverse(), { label: "warnings" })),
    (answer.rules || []).length > 0 && card("Rules", table(rules, answer.rules, { label: "rules" })),
  ];
}

// --- evaluations --------------------------------------------------------------------------------------------------------

export async function evaluationsPage(run, _, query) {
  const answer = await ask("evaluations", { run });
  const title = h("h1", {}, "Evaluations");
  if (!answer.table.length) return [title, tornNotes(answer), empty("Nothing is evaluated yet.", "With --local_eval_every a run measures itself as it goes.")];
  const rows = [...answer.table].sort((left, right) => left.set.localeCompare(right.set) || right.version - left.version);
  const passAtK = [...new Set(rows.flatMap((row) => Object.keys(row.pass_at_k || {})))].sort((left, right) => Number(left) - Number(right)).filter((k) => k !== "1");
  const columns = [
    { title: "set", cell: (row) => shown(row.set) },
    { title: "version", number: true, cell: (row) => link(ofRun(run, ["evaluation", row.set, row.version]), number(row.version)) },
    { title: "pass@1", number: true, cell: (row) => h("b", {}, share(row.pass_at_1 ?? row.share)) },
    { title: "± standard error", number: true, cell: (row) => (isKnown(row.standard_error) ? `± ${(100 * row.standard_error).toFixed(1)} %` : "–") },
    ...passAtK.map((k) => ({ title: `pass@${k}`, number: true, cell: (row) => { const error = (row.pass_at_k_standard_error || {})[k]; return [share((row.pass_at_k || {})[k]), isKnown(error) && h("span", { class: "hint" }, ` ± ${(100 * error).toFixed(1)} %`)]; } })),
    { title: "items", number: true, cell: (row) => number(row.num_items) },
  ];
  const sets = [...new Set(rows.map((row) => row.set))];
  const lines = sets.map((set, at) => {
    const own = rows.filter((row) => row.set === set).reverse();
    return { name: set, x: own.map((row) => row.version), y: own.map((row) => row.pass_at_1 ?? row.share), steps: own.map((row) => row.version), colour: COLOURS[at % COLOURS.length] };
  });
  const legend = sets.length > 1 && h("div", { class: "legend" }, lines.map((line) => h("span", { class: "entry" }, h("i", { class: "swatch", style: { background: `var(${line.colour})` } }), shown(line.name))));
  return [title, tornNotes(answer), h("section", { class: "card" }, legend, chart(lines, { title: "pass@1 by version", xName: "step", height: 220, group: "evaluations", onPick: (version) => isKnown(version) && sets.length === 1 && (location.hash = ofRun(run, ["evaluation", sets[0], version])) })), await flips(run, rows, query), card("Results", table(columns, rows, { label: "results of evaluations" }))];
}

async function flips(run, rows, query) {
  const set = query.set || rows[0].set;
  const versions = rows.filter((row) => row.set === set).map((row) => row.version).sort((left, right) => left - right);
  if (versions.length < 2) return card("Flips", h("p", { class: "hint" }, "They need two evaluations of a set."));
  const [before, after] = [Number(query.before ?? versions[0]), Number(query.after ?? versions.at(-1))];
  const choices = versions.map((version) => [version, `version ${version}`]);
  const answer = await ask("flips", { run, set, version: before, other: after }).catch((problem) => ({ problem: problem.message }));
  const all = Array.isArray(answer) ? answer : answer.flips || [];
  const value = (entry) => (typeof entry === "boolean" ? Number(entry) : entry);
  const lost = all.filter((row) => value(row.before) > value(row.after));
  const gained = all.filter((row) => value(row.before) < value(row.after));
  const mark = (entry) => chip(typeof entry === "boolean" || entry === 0 || entry === 1 ? (entry ? "right" : "wrong") : share(entry, 0), value(entry) >= 1 ? "good" : value(entry) > 0 ? "warn" : "bad");
  const columns = [
    { title: "row", cell: (row) => h("span", { class: "nowrap" }, link(ofRun(run, ["row", row.row]), middle(row.row))) },
    { title: `version ${before}`, class: "wide", cell: (row) => h("div", {}, mark(row.before), " ", excerpt(row.text_before)) },
    { title: `version ${after}`, class: "wide", cell: (row) => h("div", {}, mark(row.after), " ", excerpt(row.text_after)) },
  ];
  const sets = [...new Set(rows.map((row) => row.set))];
  const kind = query.flips || (lost.length ? "lost" : "gained");
  const chosen = kind === "lost" ? lost : gained;
  return card(
    "Flips",
    h("div", { class: "toolbar" }, sets.length > 1 && select("set", sets.map((name) => [name, name]), set, (name) => change({ set: name, before: null, after: null })), select("before", choices, before, (version) => change({ before: version })), select("after", choices, after, (version) => change({ after: version })), segments("kind", [["lost", `right → wrong (${lost.length})`], ["gained", `wrong → right (${gained.length})`]], kind, (name) => change({ flips: name }))),
    answer.problem ? h("p", { class: "hint" }, answer.problem) : chosen.length ? table(columns, chosen.slice(0, 200), { label: "flips", isStacked: true }) : h("p", { class: "hint" }, "None."),
  );
}

// --- cost ---------------------------------------------------------------------------------------------------------------

const REASONS = { zero_std: "group scored alike", masked: "group cut off", too_old: "group too old", not_scored: "not scored" };
const SECONDS = [["steps", "of all steps"], ["learners", "learners"], ["waiting", "waiting for data"], ["sync", "sending weights"], ["engines", "engines generating"], ["per_group_with_a_right_response", "for a group with a right response"]];

export async function costPage(run) {
  const [answer, runs] = [await ask("cost", { run }), await askRuns()];
  const about = runs.find((row) => row.run === run) || {};
  const { tokens, seconds } = answer;
  const rows = { "trained on": tokens.trained, ...Object.fromEntries(Object.entries(tokens.left_out).map(([name, count]) => [REASONS[name] || name, count])) };
  const kinds = Object.entries(answer.left_out_groups || {}).map(([name, counts]) => `${REASONS[name] || name}: ${Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ")}`);
  const pairs = SECONDS.map(([name, title]) => [title, isKnown(seconds[name]) ? duration(seconds[name]) : null]);
  return [
    h("h1", {}, "Cost"),
    tornNotes(answer),
    h("div", { class: "figures" }, figure(large(tokens.sampled), "tokens sampled"), figure(share(tokens.sampled ? tokens.trained / tokens.sampled : null, 0), "of them trained on"), figure(duration(seconds.per_group_with_a_right_response), "for a group with a right response"), figure(share(seconds.waiting_share, 0), "of the time learners wait"), figure(share(seconds.engines_busy_share, 0), "of the time engines generate"), isKnown(answer.dollars) && figure(`$${answer.dollars.toFixed(2)}`, "for judges")),
    h("div", { class: "columns" }, card("What became of the tokens", bars(rows, (name) => name, "token"), h("p", { class: "hint" }, `Evaluations sampled ${large(tokens.evaluations)} more.`)), card("What became of the groups", bars(answer.groups, (name) => (name === "consumed" ? "trained on" : REASONS[name] || name), "group"), kinds.map((line) => h("p", { class: "hint" }, line)))),
    card("Time", facts(pairs)),
    !isExported() && card("Talk to the model", h("p", {}, link(ofRun(run, ["chat"]), "Ask it here"), ", or:"), command(`python -m open_instruct.chat ${about.directory || "DIR"}`, "The newest model")),
  ];
}

const figure = (value, label) => h("div", { class: "figure" }, h("strong", {}, value), h("span", {}, label));

// --- chat ---------------------------------------------------------------------------------------------------------------

// What was asked and answered stays while the page is open, also when it is drawn again.
const conversations = new Map();

export async function chatPage(run) {
  const about = (await askRuns()).find((row) => row.run === run) || {};
  const where = about.directory || "DIR";
  const line = command(`python -m open_instruct.chat ${where}`, "In the terminal");
  const title = h("h1", {}, "Chat");
  if (isExported()) return [title, empty("The model is not in this file.", line)];
  const list = conversations.get(run) || conversations.set(run, h("div", { class: "chat-list" })).get(run);
  const text = h("textarea", { rows: "3", "aria-label": "message", placeholder: "A message to the newest model of this run" });
  const button = h("button", { type: "button", onclick: send }, "ask");
  async function send() {
    if (!text.value.trim()) return;
    const message = text.value;
    const waiting = h("p", { class: "hint" }, "The model is loaded on the processor, and answers. It ends if you close this page.");
    list.prepend(waiting);
    button.disabled = true;
    try {
      waiting.replaceWith(exchange(message, await askModel(run, message)));
      text.value = "";
    } catch (problem) {
      waiting.replaceWith(h("p", { class: "notice" }, shown(problem.message)));
    }
    button.disabled = false;
  }
  return [title, h("p", { class: "lead" }, "One question and one answer, with the prompt, the sampling and the stop strings of the run. For a conversation use the terminal."), card(null, text, h("div", { class: "toolbar" }, button)), list, line];
}

function exchange(message, answer) {
  const tokens = h("div", { class: "text chat-tokens" }, answer.token_texts.map((token, at) => h("span", { class: "token", title: `${answer.tokens[at]}` }, shown(token))));
  const prompt = h("details", {}, h("summary", {}, `Prompt: ${many(answer.prompt_tokens.length, "token")}`), h("pre", { class: "text" }, shown(answer.prompt)));
  const sampling = Object.entries(answer.sampling).map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(" ") || "none" : value}`).join(", ");
  return card(null, h("p", {}, h("b", {}, shown(message))), tokens, h("p", { class: "hint" }, `${many(answer.tokens.length, "token")}, ended by ${answer.ended}; ${sampling}; ${answer.model}`), prompt);
}
