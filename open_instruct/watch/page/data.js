// Asks the server for views, or the data that an exported page carries.

import { ExportedRun, Problem, packed } from "./exported.js";

let offline = null;
let heard = [];

export const isExported = () => document.getElementById("run-data") !== null;

// The JSON of a view. Arguments that are empty are not sent.
export async function ask(view, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const key = view + "?" + new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  const answer = isExported() ? JSON.stringify(await (await openExport()).answer(view, Object.fromEntries(given.map(([name, value]) => [name, String(value)])))) : await fetchText(key);
  heard.push(key + answer);
  return JSON.parse(answer);
}

// A question to the model of a run.
export async function askModel(run, message) {
  const response = await fetch("chat", { method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run, message }) }).catch(() => null);
  if (response === null) throw new Problem("The server of this page does not answer. Start it again: python -m open_instruct.watch DIR");
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  throw new Problem(text.startsWith("{") ? JSON.parse(text).problem : text);
}

// The runs, with names that tell them apart.
export async function askRuns() {
  const runs = await ask("runs");
  const isTwice = (name) => runs.filter((row) => row.name === name).length > 1;
  return runs.map((row) => ({ ...row, name: isTwice(row.name) ? `${lastParts(row.directory)} (${row.name})` : row.name }));
}

const lastParts = (path) => String(path).split("/").filter(Boolean).slice(-2).join("/");

async function fetchText(key) {
  let response;
  try {
    response = await fetch("api/" + key, { credentials: "same-origin" });
  } catch {
    throw new Problem("The server of this page does not answer. Start it again: python -m open_instruct.watch DIR");
  }
  const text = await response.text();
  if (response.ok) return text;
  if (response.status === 403) throw new Problem("This page's token is not valid any more. Open the URL that the server printed when it started.");
  let problem = text;
  try {
    problem = JSON.parse(text).problem || text;
  } catch {
    // what a proxy says is no JSON
  }
  throw new Problem(problem);
}

// What was asked and answered since the last call: a page is drawn again only if this has changed.
export function takeHeard() {
  const text = heard.join("\n");
  heard = [];
  return text;
}

// Calls back when files of the runs change.
export function subscribe(onChange, onState) {
  if (isExported()) return;
  const source = new EventSource("events");
  source.addEventListener("change", onChange);
  source.addEventListener("open", () => onState(true));
  source.addEventListener("error", () => onState(false));
}

// What an exported page carries.
export async function openExport() {
  offline ||= new ExportedRun(await packed("run-data"));
  return offline;
}
