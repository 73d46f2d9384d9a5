// The views of an exported page, from the blocks that the file holds. What does not depend on a choice lies there as it is; filters,
// orders, groups and the life of a row are made here, in the same way as the server makes them.

export class Problem extends Error {}

// The content of a block: base64 of gzip of JSON.
export async function packed(id) {
  const element = document.getElementById(id);
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (character) => character.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

// A view and its arguments in the order of their names, as the export writes them.
export function keyOf(view, query) {
  const names = Object.keys(query).filter((name) => query[name] !== "").sort();
  return view + "?" + names.map((name) => `${name}=${query[name]}`).join("&");
}

const rowsOf = (columns) => (columns[Object.keys(columns)[0]] || []).map((_, at) => Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][at]])));

export class ExportedRun {
  constructor(content) {
    this.about = content.about;
    this.views = content.views;
    this.evaluations = content.evaluations;
    this.windows = content.windows;
    this.blocks = new Map();
  }

  async answer(view, query) {
    const made = { curves: "curves", step: "step", search: "search", export_rows: "exportRows", group: "group", sample: "sample", why: "why", row: "row", tokens: "largest", staleness: "staleness", lanes: "lanes", conversations: "conversations", evaluation: "evaluation", evaluation_sample: "evaluationSample", flips: "flips" }[view];
    if (made) return this[made](query);
    return this.stored(view, query.run === undefined ? {} : { run: query.run });
  }

  stored(view, query) {
    const content = this.views[keyOf(view, query)];
    if (content === undefined || content === null) throw this.missing(view);
    return content;
  }

  missing(what) {
    const [about] = this.views["runs?"];
    return new Problem(`${what}: not in this file. To see it, open the run where its files are: python -m open_instruct.watch ${about.directory}. ${this.about.left_out.join(" ")}`);
  }

  // `names` as in the view: metrics, labels, or parts of either.
  async curves(query) {
    const whole = this.stored("curves", { run: query.run });
    if (!query.names) return whole;
    const entries = Object.values(whole.groups).flat();
    const others = document.getElementById("metrics") === null ? {} : await this.block("metrics");
    const values = {};
    for (const text of query.names.split(",")) {
      const has = (name) => name.toLowerCase().includes(text.toLowerCase());
      const all = [...entries.map((entry) => entry.name), ...Object.keys(others)];
      const candidates = [all.filter((name) => name === text), entries.filter((entry) => entry.label === text).map((entry) => entry.name), entries.filter((entry) => has(`${entry.label} ${entry.name}`)).map((entry) => entry.name), all.filter(has)];
      const names = candidates.find((own) => own.length);
      if (!names) throw whole.others.some(has) ? this.missing(`the metric ${text}`) : new Problem(`no metric is named ${text}.`);
      for (const name of names) values[name] = whole.values[name] ?? others[name];
    }
    return { ...whole, values };
  }

  // A block is unpacked when it is first looked at.
  block(kind, step) {
    const id = step === undefined ? kind : `${kind}-${Number(step)}`;
    if (document.getElementById(id) === null) throw this.missing(kind === "step" ? `step ${step}` : `the tokens of step ${step}`);
    if (!this.blocks.has(id)) this.blocks.set(id, packed(id));
    return this.blocks.get(id);
  }

  // All samples of a step, with their texts.
  async listed(step) {
    const block = await this.block("step", step);
    const texts = new Map(block.groups.map((group) => [`${group.prompt_id} ${group.attempt}`, [...group.texts]]));
    return rowsOf(block.samples).map((sample) => ({ step: Number(step), ...sample, text: texts.get(`${sample.prompt_id} ${sample.attempt}`).shift() }));
  }

  async step(query) {
    const block = await this.block("step", query.step);
    const all = await this.listed(query.step);
    const passing = all.filter((sample) => matches(sample, query));
    const matching = passing.filter((sample) => hasReward(sample, query));
    const offset = Number(query.offset || 0);
    const samples = inOrder(matching, query.sort, Number(query.seed || 0)).slice(offset, offset + Number(query.limit || 50));
    return { ...block.about, histogram: histogramOf(passing.map((sample) => sample.reward).filter((reward) => reward !== null)), num_matching: matching.length, samples };
  }

  async search(query) {
    const needle = query.text.toLowerCase();
    const limit = Number(query.limit || 20);
    const samples = [];
    for (const step of [...this.about.steps].reverse()) {
      samples.push(...(await this.listed(step)).filter((sample) => sample.text.toLowerCase().includes(needle)));
      if (samples.length >= limit) break;
    }
    return { text: query.text, samples: samples.slice(0, limit) };
  }

  async exportRows(query) {
    const block = await this.block("step", query.step);
    const groups = new Map(block.groups.map((group) => [`${group.prompt_id} ${group.attempt}`, group]));
    return (await this.listed(query.step)).filter((sample) => sample.reward !== null && matches(sample, query) && hasReward(sample, query)).map((sample) => {
      const group = groups.get(`${sample.prompt_id} ${sample.attempt}`);
      return { prompt: group.prompt_text, response: sample.text, reward: sample.reward, ground_truth: group.ground_truth, row: sample.row, source: sample.source, prompt_id: sample.prompt_id, sample: sample.sample };
    });
  }

  async groups(step) {
    const [block, samples] = [await this.block("step", step), await this.listed(step)];
    return block.groups.map((group) => {
      const own = samples.filter((sample) => sample.prompt_id === group.prompt_id && sample.attempt === group.attempt);
      const { row, source, outcome } = own[0];
      return { step: Number(step), prompt_id: group.prompt_id, attempt: group.attempt, row, source, outcome, ground_truth: group.ground_truth, prompt_text: group.prompt_text, samples: own.map((sample, at) => ({ ...sample, parts_at: group.parts_at[at] })) };
    });
  }

  async group(query) {
    const groups = (await this.groups(query.step)).filter((group) => group.prompt_id === query.prompt_id && (query.attempt === undefined || String(group.attempt) === query.attempt));
    if (!groups.length) throw new Problem(`step ${query.step} has no prompt ${query.prompt_id}.`);
    return groups.at(-1);
  }

  async sample(query) {
    const samples = (await this.block("tokens", query.step)).filter((sample) => sample.prompt_id === query.prompt_id && String(sample.sample) === query.sample && (query.attempt === undefined || String(sample.attempt) === query.attempt));
    if (!samples.length) throw this.missing(`the tokens of sample ${query.sample} of ${query.prompt_id}`);
    return { ...samples.at(-1), tokens: rowsOf(samples.at(-1).tokens) };
  }

  async why(query) {
    const [sentences, attempts] = [[], []];
    let row = null;
    for (const step of this.about.steps) {
      const own = (await this.block("step", step)).lives[query.prompt_id];
      if (!own) continue;
      sentences.push(...(sentences.length ? own.slice(1) : own));
      for (const group of (await this.groups(step)).filter((entry) => entry.prompt_id === query.prompt_id)) {
        row = group.row;
        attempts.push({ attempt: group.attempt, step, outcome: group.outcome, rewards: group.samples.map((sample) => sample.reward) });
      }
    }
    if (!attempts.length) throw this.missing(query.prompt_id);
    return { prompt_id: query.prompt_id, row, sentences, attempts };
  }

  async row(query) {
    const [groups, evaluations] = [[], []];
    for (const step of this.about.steps) {
      const block = await this.block("step", step);
      if (!block.samples.row.includes(query.row)) continue;
      groups.push(...(await this.groups(step)).filter((group) => group.row === query.row).map((group) => answersOf(group)));
    }
    for (const evaluation of Object.values(this.evaluations)) {
      evaluations.push(...evaluation.items.filter((item) => item.row === query.row).map((item) => ({ ...answersOf(item), set: evaluation.set, version: evaluation.version })));
    }
    const [first] = [...groups, ...evaluations];
    if (!first) throw this.missing(query.row);
    return { row: query.row, source: first.source, ground_truth: first.ground_truth, groups, evaluations, verdict: verdictOf((groups.length ? groups : evaluations).filter((group) => group.outcome !== "not_scored").map((group) => group.share)) };
  }

  async largest(query) {
    return (await this.block("step", query.step)).tokens;
  }

  async staleness(query) {
    const whole = this.stored("staleness", { run: query.run });
    return query.step === undefined ? whole : { ...whole, ...(await this.block("step", query.step)).staleness };
  }

  async conversations(query) {
    const whole = (await this.block("step", query.step)).conversations;
    const offset = Number(query.offset || 0);
    const lanes = whole.lanes.slice(offset, offset + Number(query.limit || 100));
    const spans = lanes.flatMap((lane) => lane.spans);
    return { ...whole, lanes, began: Math.min(...spans.map((span) => span.began)), ended: Math.max(...spans.map((span) => span.ended)) };
  }

  // Pictures of the lanes are of fixed steps, because their idle time is a number of the record.
  async lanes(query) {
    const wanted = Number(query.from_step || Infinity);
    const window = this.windows.find(([first, last]) => first <= wanted && wanted <= last) || this.windows.at(-1);
    if (!window) throw this.missing("lanes");
    return this.stored("lanes", { from_step: window[0], run: query.run, to_step: window[1] });
  }

  evaluationOf(query, version = query.version) {
    const evaluation = this.evaluations[`${query.set} ${version}`];
    if (!evaluation) throw this.missing(`the evaluation of ${query.set} at version ${version}`);
    return evaluation;
  }

  async evaluation(query) {
    const evaluation = this.evaluationOf(query);
    const offset = Number(query.offset || 0);
    return { ...evaluation, items: evaluation.items.slice(offset, offset + Number(query.limit || 200)) };
  }

  // Without tokens; the text is one.
  async evaluationSample(query) {
    const item = this.evaluationOf(query).items.find((entry) => entry.prompt_id === query.prompt_id);
    const sample = item && item.samples.find((entry) => String(entry.sample) === query.sample);
    if (!sample) throw this.missing(`sample ${query.sample} of ${query.prompt_id}`);
    return { ...item, ...sample, prompt_tokens: [], turns: [], tokens: [] };
  }

  async flips(query) {
    const items = (version) => new Map(this.evaluationOf(query, version).items.map((item) => [item.row, answersOf(item)]));
    const [before, after] = [items(query.version), items(query.other)];
    const changed = [...before].filter(([row, answers]) => after.has(row) && answers.share !== after.get(row).share);
    return changed.map(([row, answers]) => ({ row, before: answers.share, after: after.get(row).share, text_before: answers.texts[0], text_after: after.get(row).texts[0] }));
  }
}

function answersOf(group) {
  const scored = group.samples.filter((sample) => !sample.goes_on && sample.outcome !== "not_scored");
  const ends = scored.length ? scored : group.samples.filter((sample) => !sample.goes_on);
  const isKnown = ends.length > 0 && ends.every((sample) => sample.is_right !== null);
  const { step, prompt_id, attempt, source, ground_truth, outcome } = group;
  return { step, prompt_id, attempt, source, ground_truth, outcome, version: ends[0]?.oldest_version ?? null, rewards: ends.map((sample) => sample.reward), share: isKnown ? ends.filter((sample) => sample.is_right).length / ends.length : null, texts: ends.map((sample) => sample.text) };
}

// As `verdict` of the views: a group is mostly right if at least half of its responses are.
function verdictOf(shares) {
  if (!shares.length || shares.some((share) => share === null)) return "not known";
  if (shares.length === 1) return "once";
  if (!shares.some((share) => share > 0)) return "never right";
  if (shares.at(-1) >= 0.5) return "mostly right";
  return Math.max(...shares.slice(0, -1)) >= 0.5 ? "forgotten" : "mixed";
}

function matches(sample, query) {
  const outside = (value, low, high) => (low !== undefined && !(value !== null && value >= Number(low))) || (high !== undefined && !(value !== null && value <= Number(high)));
  if (query.verifier && !(sample.verdicts || []).some((entry) => entry.name === query.verifier)) return false;
  if (["source", "outcome", "finish_reason"].some((name) => query[name] && sample[name] !== query[name])) return false;
  if (outside(sample.age, query.min_age) || outside(sample.num_tokens, query.min_length, query.max_length)) return false;
  return !query.text || sample.text.toLowerCase().includes(query.text.toLowerCase());
}

const hasReward = (sample, query) => sample.reward === null ? query.min_reward === undefined && query.max_reward === undefined : (query.min_reward === undefined || sample.reward >= Number(query.min_reward)) && (query.max_reward === undefined || sample.reward <= Number(query.max_reward));

// As `histogram` of the views.
const NUM_BARS = 20;

function histogramOf(values) {
  if (!values.length) return { edges: [], counts: [] };
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const half = (high - low) / (NUM_BARS - 1) / 2 || 0.5;
  const numBars = high > low ? NUM_BARS : 1;
  const width = (high - low + 2 * half) / numBars;
  const counts = new Array(numBars).fill(0);
  for (const value of values) counts[Math.min(numBars - 1, Math.floor((value - low + half) / width))] += 1;
  return { edges: Array.from({ length: numBars + 1 }, (_, at) => low - half + at * width), counts };
}

function inOrder(samples, order, seed) {
  const reward = (sample, sign) => (sample.reward === null ? Number.MAX_VALUE : sign * sample.reward);
  const keys = { best: (sample) => reward(sample, -1), worst: (sample) => reward(sample, 1), longest: (sample) => -sample.num_tokens, shortest: (sample) => sample.num_tokens };
  if (keys[order]) return [...samples].sort((left, right) => keys[order](left) - keys[order](right));
  if (order !== "random") return samples;
  // Any order that follows from the seed.
  const number = (at) => Math.imul((at + 1) ^ (seed + 0x9e3779b9), 0x85ebca6b) >>> 0;
  return samples.map((sample, at) => [number(at), sample]).sort((left, right) => left[0] - right[0]).map(([, sample]) => sample);
}
