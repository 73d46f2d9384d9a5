// Elements, text and numbers. What a model, a tool or a row wrote reaches the page through `text` or `shown` alone, as text.

// An element. Properties that begin with "on" are listeners, `class`, `data-*` and `aria-*` are attributes; children are nodes or text.
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, part]) => element.style.setProperty(key, part));
    else element.setAttribute(name, value === true ? "" : SPOKEN.has(name) ? visible(value) : value);
  }
  append(element, children);
  return element;
}

// Attributes that are read by people.
const SPOKEN = new Set(["title", "aria-label", "placeholder"]);

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Characters that are not seen, or that turn the order of the text around them.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\u{e0000}-\u{e007f}]/u;

const nameOf = (character) => "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

// Text of others where only text can be, such as a title.
export const visible = (value) => [...String(value)].map((character) => (UNSEEN.test(character) ? `[${nameOf(character)}]` : character)).join("");

// Text of others: nothing in it is markup, and characters that nobody sees are named.
export function shown(value, className) {
  const element = h("bdi", { class: className ? `shown ${className}` : "shown" });
  const characters = String(value === null || value === undefined ? "" : value);
  if (!UNSEEN.test(characters)) {
    element.append(document.createTextNode(characters));
    return element;
  }
  let plain = "";
  for (const character of characters) {
    if (!UNSEEN.test(character)) {
      plain += character;
      continue;
    }
    element.append(document.createTextNode(plain), h("span", { class: "unseen", title: "a character that is not seen" }, nameOf(character)));
    plain = "";
  }
  element.append(document.createTextNode(plain));
  return element;
}

// The beginning of a text in one line.
export function excerpt(value, length = 160) {
  const line = String(value || "").replace(/\s+/g, " ").trim();
  return shown(line.length > length ? line.slice(0, length - 1) + "…" : line);
}

// The beginning and the end of a name, such as the place of a row, whose end tells it apart.
export function middle(value, length = 44) {
  const text = String(value ?? "");
  const head = Math.floor(length / 3);
  const element = shown(text.length > length ? `${text.slice(0, head)}…${text.slice(head + 1 - length)}` : text);
  element.title = visible(text);
  return element;
}

export const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);

const withMinus = (digits) => digits.replace(/^-/, "−");

// A number for people; an en dash where it is not known.
export function number(value, digits = 3) {
  if (!isKnown(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1e5) return withMinus(size >= 1e4 ? Math.round(value).toLocaleString("en-US") : String(value));
  if (size < 1e-3) return withMinus(value.toExponential(1));
  return withMinus(value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : digits));
}

// Always with so many digits, so that a column of numbers is aligned.
export const fixed = (value, digits = 2) => (isKnown(value) ? withMinus((Number(value.toFixed(digits)) || 0).toFixed(digits)) : "–");
export const signed = (value, digits = 3) => (isKnown(value) && value > 0 ? "+" : "") + number(value, digits);
export const signedFixed = (value, digits = 2) => (isKnown(value) && value > 0 ? "+" : "") + fixed(value, digits);
export const share = (value, digits = 1) => (isKnown(value) ? (100 * value).toFixed(digits) + " %" : "–");

export function large(value) {
  if (!isKnown(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(2) + "\u00a0G";
  if (size >= 1e6) return (value / 1e6).toFixed(2) + "\u00a0M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "\u00a0k";
  return number(value, 1);
}

export function duration(seconds) {
  if (!isKnown(seconds)) return "–";
  if (seconds < 10) return seconds.toFixed(2) + " s";
  if (seconds < 100) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (whole < 3600) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  return (days ? `${days} d ` : "") + `${hours} h ${String(minutes).padStart(2, "0")} min`;
}

export function clock(unix, withDay = false) {
  if (!isKnown(unix)) return "–";
  const date = new Date(1000 * unix);
  const time = date.toLocaleTimeString("en-GB");
  return withDay ? `${date.getFullYear()}-${String(date.getMonth() + 1).padStart(2, "0")}-${String(date.getDate()).padStart(2, "0")} ${time}` : time;
}

export const many = (count, noun, plural) => `${number(count)} ${count === 1 ? noun : plural || noun + "s"}`;

// Rows under headings. A column: {title, cell(row), number?: true, hint?}. `isStacked`: in a narrow window the cells of a row are below each other.
export function table(columns, rows, properties = {}) {
  const head = h("tr", {}, columns.map((column) => h("th", { class: [column.number && "number", column.class].filter(Boolean).join(" ") || null, scope: "col", title: column.hint }, column.title)));
  const titleOf = (column) => (properties.isStacked ? column.title : null);
  const body = rows.map((row) => h("tr", { class: properties.rowClass && properties.rowClass(row) }, columns.map((column) => h("td", { "data-title": titleOf(column), class: [column.number && "number", column.class].filter(Boolean).join(" ") || null }, column.cell(row)))));
  return h("div", { class: properties.isStacked ? "scroll stacked" : "scroll", tabindex: "0", role: "region", "aria-label": properties.label || "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

// Names and values beside each other.
export function facts(pairs) {
  const rows = pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined);
  return h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

// What an answer goes on without.
export const tornNotes = (...answers) => [...new Set(answers.flatMap((answer) => answer.torn || []))].map((sentence) => h("p", { class: "notice" }, shown(sentence)));
export const card = (title, ...children) => h("section", { class: "card" }, title && h("h2", {}, title), children);
export const empty = (title, ...text) => h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, text));
export const chip = (label, kind, title) => h("span", { class: `chip ${kind || ""}`, title }, label);
export const link = (address, ...children) => h("a", { href: address }, children);

// A list of choices of which one holds.
export function segments(label, choices, current, choose) {
  const button = ([value, name, hint]) => h("button", { type: "button", title: hint, "aria-pressed": String(value === current), onclick: () => choose(value) }, name);
  return h("div", { class: "segments", role: "group", "aria-label": label }, choices.map(button));
}

export function select(label, choices, current, choose) {
  const options = choices.map(([value, name]) => h("option", { value, selected: String(value) === String(current ?? "") }, visible(name)));
  return h("label", { class: "field" }, h("span", {}, label), h("select", { onchange: (event) => choose(event.target.value) }, options));
}

export function input(label, current, choose, properties = {}) {
  return h("label", { class: "field" }, h("span", {}, label), h("input", { value: current ?? "", onchange: (event) => choose(event.target.value), ...properties }));
}

// A command to copy.
export function command(line, label = "In the terminal") {
  const button = h("button", { type: "button", class: "quiet", onclick: copy }, "copy");
  function copy() {
    navigator.clipboard.writeText(line).then(() => (button.textContent = "copied"), () => (button.textContent = "select it"));
  }
  return h("div", { class: "command" }, h("span", { class: "hint" }, label), h("code", {}, shown(line)), button);
}

export function download(name, content) {
  const address = URL.createObjectURL(new Blob([content], { type: "application/jsonl" }));
  const anchor = h("a", { href: address, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
