// The runs of a folder, their curves over each other, and the difference of their options.

import { address, change, current, go, ofRun } from "./address.js";
import { COLOURS, MARK_COLOURS, chart } from "./charts.js";
import { ask, askRuns } from "./data.js";
import { card, chip, clock, command, empty, excerpt, facts, fixed, h, isKnown, link, number, segments, select, share, shown, table, tornNotes } from "./dom.js";

const STATES = { running: "good", ended: "plain", interrupted: "warn", failed: "bad", killed: "bad" };
const AXES = [["step", "step"], ["tokens", "tokens"], ["time", "time"]];
const GROUPS = [["learning", "Learning"], ["evaluation", "Evaluation"], ["stability", "Stability"], ["speed", "Speed"]];
const MOST_ADDED = 24;
const MARKS = ["checkpoint", "sync", "fault", "replacement", "warning", "start", "alarm"];

export const stateChip = (state) => chip(state, STATES[state] || "plain");

// --- runs -------------------------------------------------------------------------------------------------------------

export async function runsPage() {
  const runs = await askRuns();
  if (!runs.length) return [h("h1", {}, "Runs"), empty("No run was found.", "Give the --output_dir of a run, or a folder of such directories: python -m open_instruct.watch output/")];
  if (runs.length === 1 && !current().query.list) return go(ofRun(runs[0].run, ["curves"]));
  const chosen = new Set();
  const compare = h("button", { type: "button", class: "primary", disabled: true, onclick: () => go(address(["compare"], { runs: [...chosen].sort().join(",") })) }, "Compare");
  const pick = (run, event) => {
    if (event.target.checked) chosen.add(run);
    else chosen.delete(run);
    compare.disabled = chosen.size < 2 || chosen.size > 8;
    compare.textContent = chosen.size >= 2 ? `Compare ${chosen.size} runs` : "Compare";
  };
  const columns = [
    { title: "", cell: (row) => h("input", { type: "checkbox", "aria-label": `compare ${row.name}`, onchange: (event) => pick(row.run, event) }) },
    { title: "run", class: "wide", cell: (row) => link(ofRun(row.run, ["curves"]), shown(row.name)) },
    { title: "state", cell: (row) => h("span", { title: row.end }, stateChip(row.state), row.starts > 1 && h("span", { class: "hint" }, ` ${row.starts} starts`)) },
    { title: "model", class: "model", cell: (row) => shown(shortModel(row.model)) },
    { title: "step", number: true, cell: (row) => `${number(row.step)}${isKnown(row.num_steps) ? ` / ${number(row.num_steps)}` : ""}` },
    { title: "reward", number: true, cell: (row) => fixed(row.reward, 3) },
    { title: "evaluations", cell: (row) => evaluationsOf(row) },
  ];
  return [h("div", { class: "title-row" }, h("h1", {}, "Runs"), compare), tornNotes(...runs), h("p", { class: "lead" }, "Two to eight that are ticked can be laid over each other."), table(columns, runs, { label: "runs" })];
}

const evaluationsOf = (row) => h("span", {}, Object.entries(row.evaluations || {}).map(([set, result]) => h("span", { class: "pair" }, shown(set), " ", h("b", {}, resultOf(result)), h("span", { class: "hint" }, ` v${result.version}`))));
// Where only reward functions score, nothing is right or wrong.
const resultOf = (result) => (isKnown(result.share) || !isKnown(result.reward) ? share(result.share) : `reward ${number(result.reward)}`);

export const shortModel = (model) => String(model ?? "–").split("/").filter(Boolean).slice(-2).join("/");

// --- curves -----------------------------------------------------------------------------------------------------------

function axisOf(curves, axis) {
  if (axis === "tokens") return curves.tokens;
  const first = curves.unix.find(isKnown);
  return axis === "time" ? curves.unix.map((unix) => (isKnown(unix) ? (unix - first) / 60 : null)) : curves.step;
}

function viewOptions(query, others = []) {
  const weight = Number(query.smooth || 0);
  const slider = h("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: weight, "aria-label": "smoothing", onchange: (event) => change({ smooth: Number(event.target.value) || null }) });
  return h(
    "div",
    { class: "toolbar" },
    segments("x-axis", AXES, query.x || "step", (value) => change({ x: value === "step" ? null : value, zoom: null })),
    h("label", { class: "field inline" }, h("span", {}, "smoothing"), slider, h("output", {}, weight ? weight.toFixed(2) : "off")),
    others,
    query.zoom && h("button", { type: "button", onclick: () => change({ zoom: null }) }, "whole run"),
  );
}

function markChips(marks, hidden) {
  const kinds = MARKS.filter((kind) => marks.some((mark) => mark.kind === kind));
  const toggle = (kind) => change({ hide: hidden.has(kind) ? [...hidden].filter((name) => name !== kind).join(",") || "none" : [...hidden, kind].join(",") });
  return kinds.length > 0 && h("div", { class: "marks", role: "group", "aria-label": "marks" }, kinds.map((kind) => h("button", { type: "button", class: "mark", "aria-pressed": String(!hidden.has(kind)), onclick: () => toggle(kind) }, h("i", { class: "swatch", style: { background: `var(${MARK_COLOURS[kind]})` } }), kind)));
}

const zoomOf = (query) => (query.zoom ? query.zoom.split("~").map(Number) : null);
const setZoom = (from, to) => change({ zoom: from === null ? null : `${from.toFixed(3)}~${to.toFixed(3)}` });

async function firstAlarm(run) {
  const health = await ask("health", { run }).catch(() => ({ alarms: [] }));
  const alarms = (health.alarms || []).filter((alarm) => isKnown(alarm.step)).sort((left, right) => left.step - right.step);
  return alarms.length ? [{ step: alarms[0].step, kind: "alarm", text: alarms[0].text }] : [];
}

export async function curvesPage(run, _, query) {
  const added = query.names ? query.names.split(",") : [];
  const [runs, curves] = [await askRuns(), await ask("curves", { run })];
  const answers = await Promise.all(added.map((names) => ask("curves", { run, names }).catch((problem) => ({ values: {}, problem: problem.message }))));
  const more = { values: Object.assign({}, ...answers.map((answer) => answer.values)) };
  const problems = answers.map((answer) => answer.problem).filter(Boolean);
  const about = runs.find((row) => row.run === run) || runs[0] || {};
  const title = h("div", { class: "title-row" }, h("h1", {}, "Curves"), stateChip(about.state));
  const summary = facts([
    ["model", shown(shortModel(about.model))],
    ["step", `${number(about.step)}${isKnown(about.num_steps) ? ` of ${number(about.num_steps)}` : ""}`],
    ["reward", number(about.reward)],
    ...Object.entries(about.evaluations || {}).map(([set, result]) => [shown(set), resultOf(result)]),
    ["last written", clock([...curves.unix].reverse().find(isKnown), true)],
  ]);
  const end = about.end && h("p", { class: "notice" }, shown(about.end));
  const isTrained = curves.step.some((step) => step > 0);
  if (!curves.step.length) return [title, summary, end, curves.problem && h("p", { class: "notice" }, curves.problem), noStep(run)];
  const x = axisOf(curves, query.x);
  const marks = [...(curves.marks || []), ...(await firstAlarm(run))];
  const hidden = new Set((query.hide ?? "sync").split(",").filter((kind) => kind !== "none"));
  const placed = marks.filter((mark) => !hidden.has(mark.kind)).map((mark) => ({ ...mark, x: x[curves.step.indexOf(mark.step)] ?? (query.x ? undefined : mark.step) })).filter((mark) => isKnown(mark.x));
  const options = { xName: query.x || "step", weight: Number(query.smooth || 0), marks: placed, zoom: zoomOf(query), onZoom: setZoom, onPick: (step) => isKnown(step) && go(ofRun(run, ["step", step])), group: "run" };
  // Evaluations are few, and each is a mean already.
  const weightOf = (key) => (key === "evaluation" ? 0 : options.weight);
  const drawn = (entry, values, key) => values[entry.name] && chart([{ name: entry.name, x, y: scaled(entry.name, values[entry.name]), steps: curves.step }], { ...options, weight: weightOf(key), title: titleOf(entry), hint: entry.name });
  const chartsOf = (key) => ((curves.groups || {})[key] || []).map((entry) => drawn(entry, curves.values, key)).filter(Boolean);
  const sections = GROUPS.map(([key, name]) => [name, chartsOf(key)]).filter(([, charts]) => charts.length);
  const extra = Object.keys(more.values).slice(0, MOST_ADDED).map((name) => drawn({ name, label: name }, more.values)).filter(Boolean);
  return [
    title,
    summary,
    end,
    !isTrained && noStep(run),
    h("p", { class: "lead" }, "Drag over a curve to zoom, double-click to see all, click to open the step."),
    viewOptions(query, [markChips(marks, hidden), addMetric(query, added, curves.others)]),
    problems.map((problem) => h("p", { class: "notice" }, problem)),
    extra.length > 0 && section("Added", extra),
    sections.map(([name, charts]) => section(name, charts)),
    markList(run, marks, hidden),
  ];
}

// Bytes are drawn as GiB.
const isBytes = (name) => name.endsWith("_bytes");
const scaled = (name, values) => (isBytes(name) ? values.map((value) => (isKnown(value) ? value / 2 ** 30 : value)) : values);
const titleOf = (entry) => [shown(entry.label || entry.name), isBytes(entry.name) && h("span", { class: "hint" }, " GiB")];

const section = (name, charts) => h("section", { class: "curves" }, h("h2", {}, name), h("div", { class: "charts" }, charts));

function addMetric(query, added, others) {
  const take = (event) => event.target.value && change({ names: [...new Set([...added, event.target.value.trim()])].join(",") });
  return h("label", { class: "field inline" }, h("span", {}, "metric"), h("input", { placeholder: "name, or a part of it", list: "other-metrics", onchange: take, spellcheck: "false" }), h("datalist", { id: "other-metrics" }, (others || []).map((name) => h("option", { value: name }))), added.length > 0 && h("button", { type: "button", class: "quiet", onclick: () => change({ names: null }) }, "clear"));
}

function markList(run, marks, hidden) {
  const rows = marks.filter((mark) => !hidden.has(mark.kind)).sort((left, right) => right.step - left.step).slice(0, 100);
  const columns = [
    { title: "step", number: true, cell: (row) => (isKnown(row.step) ? link(ofRun(run, ["step", row.step]), number(row.step)) : "–") },
    { title: "what", cell: (row) => h("span", { class: "pair" }, h("i", { class: "swatch", style: { background: `var(${MARK_COLOURS[row.kind] || "--grey"})` } }), row.kind) },
    { title: "", class: "wide", cell: (row) => excerpt(row.text, 240) },
  ];
  return rows.length > 0 && card("Marks", table(columns, rows, { label: "marks" }));
}

function noStep(run) {
  return empty("No step is trained yet.", "What has been sampled so far can be read: ", link(ofRun(run, ["step"]), "the step that is being put together"), ".");
}

// --- runs over each other -----------------------------------------------------------------------------------------------

export async function comparePage(query) {
  const runs = await askRuns();
  const chosen = (query.runs || "").split(",").filter(Boolean).map(Number).slice(0, 8).map((run) => runs.find((row) => row.run === run)).filter(Boolean);
  if (chosen.length < 2) return [h("h1", {}, "Compare"), empty("Two to eight runs are compared.", "Tick them in ", link("#/?list=1", "the list of runs"), ".")];
  const all = await Promise.all(chosen.map((row) => ask("curves", { run: row.run })));
  const names = new Map(all.flatMap((curves) => GROUPS.flatMap(([key]) => ((curves.groups || {})[key] || []).map((entry) => [entry.name, { ...entry, key }]))));
  const options = { xName: query.x || "step", weight: Number(query.smooth || 0), zoom: zoomOf(query), onZoom: setZoom, group: "runs" };
  const lines = (name) => all.map((curves, at) => ({ name: chosen[at].name, x: axisOf(curves, query.x), y: curves.values[name] ? scaled(name, curves.values[name]) : curves.step.map(() => null), steps: curves.step, colour: COLOURS[at] }));
  const charts = (key) => [...names.values()].filter((entry) => entry.key === key).map((entry) => chart(lines(entry.name), { ...options, title: titleOf(entry), hint: entry.name }));
  const legend = h("div", { class: "legend" }, chosen.map((row, at) => h("span", { class: "entry" }, h("i", { class: "swatch", style: { background: `var(${COLOURS[at]})` } }), link(ofRun(row.run, ["curves"]), shown(row.name)))));
  return [
    h("h1", {}, "Compare"),
    legend,
    viewOptions(query),
    await optionsDifference(chosen),
    GROUPS.map(([key, name]) => [name, charts(key)]).filter(([, figures]) => figures.length).map(([name, figures]) => section(name, figures)),
  ];
}

async function optionsDifference(chosen) {
  const [first, ...rest] = chosen;
  const answers = await Promise.all(rest.map((row) => ask("options", { run: first.run, other: row.run }).catch(() => [])));
  const names = [...new Set(answers.flat().map((row) => row.name))].sort();
  if (!names.length) return card("Options", h("p", { class: "hint" }, "All options are the same."));
  const valueOf = (name) => answers.map((rows) => rows.find((row) => row.name === name)).find(Boolean)?.value;
  const columns = [
    { title: "option", cell: (name) => h("code", {}, name) },
    { title: shown(first.name), cell: (name) => option(valueOf(name)) },
    ...rest.map((row, at) => ({ title: shown(row.name), cell: (name) => { const entry = answers[at].find((value) => value.name === name); return entry ? h("b", {}, option(entry.other)) : h("span", { class: "hint" }, "the same"); } })),
  ];
  return card("Options that differ", table(columns, names, { label: "options that differ" }));
}

const option = (value) => shown(typeof value === "string" ? value : JSON.stringify(value ?? null));

// --- options of a run ---------------------------------------------------------------------------------------------------

export async function optionsPage(run, _, query) {
  const [runs, options] = [await askRuns(), await ask("options", { run, other: query.other })];
  const about = runs.find((row) => row.run === run) || {};
  const needle = (query.text || "").toLowerCase();
  const kinds = { given: (row) => row.given, derived: (row) => row.derived, all: () => true };
  const rows = options.filter(kinds[query.kind || (query.other ? "all" : "given")] || kinds.all).filter((row) => row.name.toLowerCase().includes(needle));
  const columns = [
    { title: "option", cell: (row) => h("code", {}, "--" + row.name) },
    { title: "value", class: "wide", cell: (row) => option(row.value) },
    query.other !== undefined && { title: "in the other run", cell: (row) => h("b", {}, option(row.other)) },
    { title: "from", cell: (row) => (row.given ? chip("given", "good") : row.derived ? chip("derived", "plain") : h("span", { class: "hint" }, "default")) },
  ].filter(Boolean);
  return [
    h("h1", {}, "Options"),
    h("div", { class: "toolbar" }, segments("which", [["given", "given"], ["derived", "derived"], ["all", "all"]], query.kind || (query.other ? "all" : "given"), (kind) => change({ kind })), runs.length > 1 && select("beside", [["", "–"], ...runs.filter((row) => row.run !== run).map((row) => [row.run, row.name])], query.other, (other) => change({ other })), h("input", { type: "search", placeholder: "name", value: query.text || "", "aria-label": "option's name", onchange: (event) => change({ text: event.target.value }) })),
    about.command && command(about.command, "Started by"),
    rows.length ? table(columns, rows, { label: "options" }) : empty("No option here.", options.length ? "None matches." : "The run has written no options.json yet."),
  ];
}
