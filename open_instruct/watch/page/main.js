// Draws the state that the address names, and again when the run's files have changed.

import { current, go, ofRun } from "./address.js";
import { disposeCharts } from "./charts.js";
import { askRuns, isExported, openExport, subscribe, takeHeard } from "./data.js";
import { empty, h, shown, visible } from "./dom.js";
import { Problem } from "./exported.js";
import { comparePage, curvesPage, optionsPage, runsPage } from "./runs.js";
import { evaluationPage, groupPage, rowPage, samplePage, searchPage, stepPage, tokensPage, whyPage } from "./samples.js";
import { chatPage, costPage, evaluationsPage, healthPage, lanesPage, stalenessPage } from "./system.js";

const stepPages = (run, parts, query) => [stepPage, stepPage, groupPage, samplePage][Math.min(parts.length, 3)](run, parts, query);

// name → [title in the menu, page]
const PAGES = {
  curves: ["Curves", curvesPage],
  step: ["Steps", stepPages],
  evaluations: ["Evaluations", evaluationsPage],
  health: ["Health", healthPage],
  lanes: ["Lanes", lanesPage],
  staleness: ["Staleness", stalenessPage],
  cost: ["Cost", costPage],
  options: ["Options", optionsPage],
  search: ["Search", searchPage],
  chat: ["Chat", chatPage],
  tokens: [null, tokensPage],
  why: [null, whyPage],
  row: [null, rowPage],
  evaluation: [null, evaluationPage],
};
const MENU = Object.keys(PAGES).filter((name) => PAGES[name][0]);
const KEYS = [
  ["← →", "the step, group or sample before and after"],
  ["Shift ← →", "the step before and after, from anywhere in a step"],
  ["j k", "the next and the last token"],
  ["u", "one level up: sample, group, step"],
  ["/", "search"],
  ["1 – 9", "the pages of the menu"],
  ["t", "light, dark, as the system"],
  ["?", "this list"],
  ["Esc", "close"],
];

const menu = h("nav", { class: "menu", "aria-label": "pages" });
const content = h("main", { id: "content", tabindex: "-1" });
const live = h("span", { class: "live", hidden: true });
const notice = h("div", { class: "notice", hidden: true });
let drawNumber = 0;
let lastHeard = "";
let waitsForDraw = false;
let focusesSearch = false;
let hasServer = false;
let isLive = false;

// --- drawing ------------------------------------------------------------------------------------------------------------

async function pageOf({ parts, query }) {
  if (parts[0] === "compare") return comparePage(query);
  if (parts[0] !== "run") return runsPage();
  const [, run, name = "curves", ...rest] = parts;
  if (!(name in PAGES)) return [empty("There is no such page.", shown(name))];
  return PAGES[name][1](Number(run), rest, query);
}

// Draws the address. `isRefresh`: files have changed; what is the same is left as it is, with its scroll and folds.
async function draw(isRefresh = false) {
  const number = ++drawNumber;
  const here = current();
  takeHeard();
  if (!isRefresh) content.setAttribute("aria-busy", "true");
  let nodes;
  try {
    nodes = await pageOf(here);
  } catch (error) {
    if (!(error instanceof Problem)) console.error(error);
    nodes = [empty("This cannot be shown.", shown(error.message))];
  }
  if (number !== drawNumber) return;
  const heard = takeHeard();
  if (isRefresh && heard === lastHeard) return;
  if (isRefresh && isBusy()) return;
  lastHeard = heard;
  content.removeAttribute("aria-busy");
  if (nodes === undefined) return;
  const scroll = isRefresh || content.dataset.path === here.parts.join("/") ? scrollY : 0;
  content.replaceChildren(...[nodes].flat(9).filter((node) => node instanceof Node));
  disposeCharts();
  content.dataset.path = here.parts.join("/");
  scrollTo(0, scroll);
  focusSearch();
  drawMenu(here);
}

// Somebody writes into a field, or has marked text to copy.
const isBusy = () => ["INPUT", "SELECT"].includes(document.activeElement?.tagName) || String(getSelection()) !== "";

async function drawMenu({ parts }) {
  const run = parts[0] === "run" ? Number(parts[1]) : null;
  const runs = await askRuns().catch(() => []);
  takeHeard();
  const name = parts[2] || "curves";
  const activePage = { why: "search", row: "search", tokens: "step", evaluation: "evaluations" }[name] || name;
  const entry = (page, at) => h("a", { href: ofRun(run, [page]), "aria-current": page === activePage ? "page" : null, title: `key ${at + 1}` }, PAGES[page][0]);
  const about = runs.find((row) => row.run === run);
  isLive = runs.some((row) => row.state === "running" && (run === null || row.run === run));
  tellLive();
  const others = runs.length > 1 && h("a", { href: "#/?list=1", "aria-current": run === null ? "page" : null }, "All runs");
  const choice = run !== null && runs.length > 1 && h("select", { "aria-label": "run", onchange: (event) => go(ofRun(event.target.value, [name in PAGES && PAGES[name][0] ? name : "curves"])) }, runs.map((row) => h("option", { value: row.run, selected: row.run === run }, visible(row.name))));
  const title = about ? h("div", { class: "run-name", title: about.directory }, choice || shown(about.name)) : null;
  menu.replaceChildren(...[h("a", { class: "brand", href: "#/?list=1" }, "open_instruct"), title, h("div", { class: "menu-pages" }, others, run !== null && MENU.map(entry))].filter(Boolean));
  document.title = visible([PAGES[name]?.[0] || name, about?.name, "open_instruct"].filter(Boolean).join(" · "));
  menu.querySelector("[aria-current=page]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

// --- theme, help, keys ----------------------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function storedTheme() {
  try {
    return localStorage.getItem("theme") || "system";
  } catch {
    return "system"; // a browser may refuse to store
  }
}

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.toggleAttribute("data-dark", theme === "dark" || (theme === "system" && systemIsDark.matches));
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // then it holds for this visit
  }
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  nameTheme();
  draw();
}

const themeName = h("span", {});
const themeButton = h("button", { type: "button", class: "quiet", onclick: nextTheme, title: "light, dark, as the system: key t", "aria-label": "theme" }, "◐ ", themeName);
const nameTheme = () => (themeName.textContent = document.documentElement.dataset.theme);
const help = h("dialog", { class: "help", "aria-label": "keys" }, h("h2", {}, "Keys"), h("dl", { class: "facts" }, KEYS.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)))), h("form", { method: "dialog" }, h("button", {}, "close")));
const helpButton = h("button", { type: "button", class: "quiet", onclick: () => help.showModal(), title: "keys: key ?", "aria-label": "keys" }, h("span", {}, "keys "), h("kbd", {}, "?"));

function follow(selector) {
  const target = content.querySelector(selector)?.getAttribute("href");
  if (target) go(target);
}

function onKey(event) {
  const here = current();
  const [place, run, name, ...rest] = here.parts;
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.key === "Escape") return document.activeElement?.blur();
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const openRun = place === "run" ? run : "0";
  const keys = {
    "?": () => help.showModal(),
    "/": () => openSearch(openRun),
    t: nextTheme,
    ArrowLeft: () => (event.shiftKey ? moveStep(here, -1) : follow("[data-arrow=previous]")),
    ArrowRight: () => (event.shiftKey ? moveStep(here, 1) : follow("[data-arrow=next]")),
    j: () => content.querySelector(".token-view")?.tokenMove(1),
    k: () => content.querySelector(".token-view")?.tokenMove(-1),
    u: () => place === "run" && rest.length > 0 && go(ofRun(run, [name, ...rest.slice(0, -1)])),
  };
  if (/^[1-9]$/.test(event.key) && MENU[event.key - 1]) keys[event.key] = () => go(ofRun(openRun, [MENU[event.key - 1]]));
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}

function moveStep({ parts }, by) {
  const [place, run, name, step] = parts;
  if (place === "run" && name === "step" && step) go(ofRun(run, ["step", Number(step) + by]));
}

function openSearch(run) {
  focusesSearch = true;
  if (current().parts[2] === "search") focusSearch();
  else go(ofRun(run, ["search"]));
}

function focusSearch() {
  const field = content.querySelector("input[type=search]");
  if (!focusesSearch || !field) return;
  focusesSearch = false;
  field.focus();
}

// --- start ----------------------------------------------------------------------------------------------------------------

function onChange() {
  if (waitsForDraw) return;
  waitsForDraw = true;
  setTimeout(() => {
    waitsForDraw = false;
    if (!document.hidden) draw(true);
  }, 500);
}

function onLive(isConnected) {
  live.hidden = false;
  hasServer = isConnected;
  tellLive();
}

// A run that is over is not called live.
function tellLive() {
  live.classList.toggle("off", !hasServer);
  live.title = hasServer ? "the page follows the run's files" : "the server does not answer";
  live.replaceChildren(h("span", {}, !hasServer ? "not connected" : isLive ? "live" : "connected"));
}

async function start() {
  setTheme(storedTheme());
  nameTheme();
  const tools = h("div", { class: "tools" }, live, themeButton, helpButton);
  document.body.append(h("a", { class: "skip", href: "#content", onclick: (event) => { event.preventDefault(); content.focus(); } }, "to the content"), h("header", { class: "side" }, menu, tools), h("div", { class: "page" }, notice, content), help);
  addEventListener("hashchange", () => draw());
  addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => !document.hidden && draw(true));
  systemIsDark.addEventListener("change", () => {
    setTheme(document.documentElement.dataset.theme);
    draw();
  });
  subscribe(onChange, onLive);
  if (isExported()) await tellWhatIsMissing();
  await draw();
}

async function tellWhatIsMissing() {
  const { about } = await openExport();
  notice.hidden = false;
  notice.append(h("details", {}, h("summary", {}, about.title), h("ul", {}, about.left_out.map((sentence) => h("li", {}, sentence)))));
}

start();

