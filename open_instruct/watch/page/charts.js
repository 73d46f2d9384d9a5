// Curves with uPlot: one chart for a metric, with a crosshair that all charts of a page share, marks, and drag to zoom.

import { h, number } from "./dom.js";

// Colours that the colour-blind can tell apart (Okabe and Ito), and dashes for those who see none.
export const COLOURS = ["--blue", "--orange", "--green", "--purple", "--vermillion", "--sky", "--yellow", "--grey"];
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3], [14, 4], [4, 4], [1, 5], [10, 2, 2, 2, 2, 2]];
export const MARK_COLOURS = { checkpoint: "--green", sync: "--grey", fault: "--vermillion", replacement: "--purple", warning: "--orange", start: "--blue", alarm: "--vermillion" };

const openCharts = new Set();

// Ends the charts that were on the page and are no longer. Others are not on it yet.
export function disposeCharts() {
  for (const entry of openCharts) {
    if (!entry.plot.uplot || entry.plot.isConnected) continue;
    entry.observer.disconnect();
    entry.plot.uplot.destroy();
    openCharts.delete(entry);
  }
}

const colourOf = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

// Exponential smoothing whose first values are not drawn to zero. Absent values stay absent.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// One chart. `lines`: [{name, x, y, steps}], drawn over each other. `options`: {title, hint, xName, weight, marks, zoom: [from, to] | null,
// onZoom(from, to), onPick(step), group, height}.
export function chart(lines, options) {
  const readout = h("span", { class: "readout" });
  const plot = h("div", { class: "plot" });
  const figure = h("figure", { class: "chart" }, h("figcaption", { title: options.hint }, h("span", { class: "chart-title" }, options.title), readout), plot);
  const known = lines.map((line) => withoutGaps(line)).filter((line) => line.x.length);
  if (!known.length) {
    plot.append(h("p", { class: "hint no-values" }, "no values yet"));
    return figure;
  }
  const observer = new ResizeObserver(() => {
    if (!plot.clientWidth) return;
    if (plot.uplot) plot.uplot.setSize({ width: plot.clientWidth, height: options.height || 170 });
    else plot.uplot = drawn(plot, known, readout, options);
  });
  observer.observe(plot);
  openCharts.add({ plot, observer });
  return figure;
}

function withoutGaps(line) {
  const places = line.x.map((_, at) => at).filter((at) => line.x[at] !== null && line.y[at] !== null && line.y[at] !== undefined);
  return { ...line, x: places.map((at) => line.x[at]), y: places.map((at) => line.y[at]), steps: places.map((at) => line.steps[at]) };
}

// uPlot wants one x-axis for all lines, in order and without repetition.
function joined(lines, weight) {
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((left, right) => left - right);
  const place = new Map(x.map((value, at) => [value, at]));
  const steps = new Array(x.length).fill(null);
  const columns = lines.flatMap((line) => {
    const raw = new Array(x.length).fill(null);
    line.x.forEach((value, at) => {
      raw[place.get(value)] = line.y[at];
      steps[place.get(value)] ??= line.steps[at];
    });
    return weight ? [raw, smoothed(raw, weight)] : [raw];
  });
  return { data: [x, ...columns], steps };
}

function drawn(plot, lines, readout, options) {
  const { data, steps } = joined(lines, options.weight);
  const perLine = options.weight ? 2 : 1;
  const few = data[0].length < 40;
  const series = lines.flatMap((line, at) => {
    const stroke = colourOf(line.colour || COLOURS[at % COLOURS.length]);
    const strong = { stroke, width: 1.8, dash: DASHES[at % DASHES.length], spanGaps: true, points: { show: few && !options.weight, size: 5, fill: stroke } };
    return options.weight ? [{ stroke: stroke + "55", width: 1, spanGaps: true, points: { show: false } }, strong] : [strong];
  });
  const axis = { stroke: colourOf("--quiet"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const settings = {
    width: plot.clientWidth,
    height: options.height || 170,
    legend: { show: false },
    padding: [8, 16, 0, 0],
    cursor: { sync: { key: options.group || "curves" }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false, range: (_, low, high) => options.zoom || widened(low, high) }, y: { range: (_, low, high) => padded(low, high) } },
    series: [{}, ...series],
    axes: [
      { ...axis, size: 26, values: (_, values) => ticks(values), ...(options.xName === "step" && { incrs: WHOLE }) },
      { ...axis, size: 50, values: (_, values) => ticks(values) },
    ],
    hooks: {
      draw: [(u) => drawMarks(u, options)],
      setCursor: [(u) => readout.replaceChildren(...readoutOf(u, lines, steps, perLine, options))],
      setSelect: [(u) => zoom(u, options)],
      ready: [(u) => listen(u, steps, options)],
    },
  };
  const figure = new globalThis.uPlot(settings, data, plot);
  readout.replaceChildren(...readoutOf(figure, lines, steps, perLine, options));
  return figure;
}

const widened = (low, high) => (low === null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high]);

// Distances of ticks on an axis of steps, none of which is half a step.
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

function padded(low, high) {
  if (low === null) return [0, 1];
  if (low === 0 && high === 0) return [-0.03, 0.5]; // what is always 0 is mostly a share or a count
  const space = high - low > 1e-9 * Math.abs(high) ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 0.5;
  return [low - space, high + space];
}

// Labels with as many digits as tell them apart.
function ticks(values) {
  for (const more of [0, 1, 2, 3]) {
    const labels = values.map((value) => tick(value, more));
    if (new Set(labels).size === labels.length || more === 3) return labels;
  }
}

function tick(value, more = 0) {
  const size = Math.abs(value);
  if (value === null) return "";
  if (size >= 1e6) return +(value / 1e6).toFixed(2 + more) + "M";
  if (size >= 1e4) return +(value / 1e3).toFixed(1 + more) + "k";
  return size && size < 1e-3 ? value.toExponential(more).replaceAll("-", "−") : String(+value.toFixed(4 + more)).replace("-", "−");
}

function readoutOf(u, lines, steps, perLine, options) {
  const hovered = u.cursor.idx;
  const at = hovered ?? steps.length - 1;
  const values = lines.map((line, index) => {
    const column = u.data[1 + index * perLine + perLine - 1];
    const value = hovered === null || hovered === undefined ? line.y.at(-1) : column[at];
    const label = lines.length > 1 ? h("i", { class: "swatch", style: { background: `var(${line.colour || COLOURS[index % COLOURS.length]})` } }) : null;
    return h("span", {}, label, number(value));
  });
  if (hovered === null || hovered === undefined) return values;
  const near = (options.marks || []).filter((mark) => Math.abs(mark.x - u.data[0][at]) < 0.5).slice(0, 2);
  const where = options.xName === "time" ? `${number(u.data[0][at], 1)} min` : options.xName === "tokens" ? `${tick(u.data[0][at])} tokens` : `step ${steps[at]}`;
  return [h("span", { class: "hint" }, where, near.map((mark) => ` · ${mark.kind}`)), ...values];
}

function drawMarks(u, options) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const ratio = globalThis.devicePixelRatio || 1;
  for (const mark of options.marks || []) {
    const at = Math.round(u.valToPos(mark.x, "x", true));
    ctx.strokeStyle = ctx.fillStyle = colourOf(MARK_COLOURS[mark.kind] || "--grey");
    ctx.globalAlpha = mark.kind === "alarm" ? 1 : 0.55;
    ctx.lineWidth = (mark.kind === "alarm" ? 2 : 1) * ratio;
    ctx.setLineDash(mark.kind === "alarm" ? [] : [3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(at - 4 * ratio, bbox.top);
    ctx.lineTo(at + 4 * ratio, bbox.top);
    ctx.lineTo(at, bbox.top + 6 * ratio);
    ctx.fill();
  }
  ctx.restore();
}

function zoom(u, options) {
  if (u.select.width < 4 || !options.onZoom) return;
  options.onZoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
}

function listen(u, steps, options) {
  let pressed = 0;
  u.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  u.over.addEventListener("click", (event) => {
    const at = u.cursor.idx;
    if (Math.abs(event.clientX - pressed) < 4 && at !== null && at !== undefined && options.onPick) options.onPick(steps[at]);
  });
  u.over.addEventListener("dblclick", () => options.onZoom && options.onZoom(null, null));
}

// Bars that are buttons: edges are values between which a bar counts.
export function histogram({ edges, counts }, current, choose) {
  const most = Math.max(1, ...counts);
  // The extremes are in the middle of the outer bars: no value is beyond them.
  const half = (edges[1] - edges[0]) / 2;
  const [least, greatest] = [edges[0] + half, edges.at(-1) - half];
  const clean = (value) => (Math.abs(value) < 1e-9 ? 0 : value);
  const within = (value) => number(clean(Math.max(least, Math.min(greatest, value))), 2);
  const bars = counts.map((count, at) => {
    const [low, high] = [edges[at], edges[at + 1]];
    const chosen = current && Math.abs(current[0] - low) < 1e-9 && Math.abs(current[1] - high) < 1e-9;
    const name = counts.length > 1 ? `${within(low)} to ${within(high)}: ${count} responses` : `${within(low)}: ${count} responses`;
    const bar = h("span", { class: "bar", style: { height: `${count ? Math.max(3, (100 * count) / most) : 0}%` } });
    return h("button", { type: "button", class: "bin", title: name, "aria-label": name, "aria-pressed": String(Boolean(chosen)), disabled: !count, onclick: () => choose(chosen ? null : [low, high]) }, h("span", { class: "count" }, count || ""), h("span", { class: "column" }, bar));
  });
  const labels = (counts.length > 1 ? [least, (least + greatest) / 2, greatest] : [least]).map((value) => h("span", {}, number(clean(value), 2)));
  return h("div", { class: "histogram" }, h("div", { class: "bins" }, bars), h("div", { class: "bin-edges" }, labels));
}

// A small line without axes.
export function spark(values, label) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return h("span", { class: "hint" }, "–");
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const points = known.map((value, at) => `${((100 * at) / (known.length - 1)).toFixed(1)},${(22 - (20 * (value - low)) / (high - low || 1)).toFixed(1)}`);
  const picture = svg("svg", { viewBox: "0 0 100 24", class: "spark", preserveAspectRatio: "none", role: "img", "aria-label": label });
  picture.append(svg("polyline", { points: points.join(" ") }));
  return picture;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

