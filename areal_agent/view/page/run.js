// Runs side by side: how each stands, curves by train step, where the time of both sides went, and what happened when.

import { ask, bounds, count, duration, el, short, svg, word } from "./parts.js";

const HEIGHT = 150, LEFT = 54, RIGHT = 8, TOP = 8, BOTTOM = 20, MAX_POINTS = 600;
const CURVES = [ // title, unit, then the metrics: name, how it is drawn
  ["Reward", "", ["reward/mean", "mean"], ["reward/success", "success", "dash"]],
  ["Tokens per second", "", ["tokens_per_s/generated", "sampled"], ["tokens_per_s/trained", "trained", "dash"]],
  ["Staleness", "versions", ["staleness/mean", "mean"], ["staleness/max", "highest", "dash"]],
  ["Mismatch of trainer and engine", "nats", ["trainer/logp_diff_mean", "mean"], ["trainer/logp_diff_fresh_max", "highest of fresh tokens", "dash"]],
  ["Shared prefixes", "tokens", ["trainer/shared_positions", "computed once for several sequences"], ["trainer/repeated_positions", "computed again", "dash"]],
];
const SIDES = [["engine", "The engine's time"], ["trainer", "The trainer's time"]];
const HELD_OUT = "held-out";
const BUSY = ["generating", "training", "evaluating"];
const FAULTS = /^(rollouts\/dropped\/(error|infra|orphan|missing_reward)|trainer\/num_skipped_updates|gateway\/errors|engine\/servers_out)$/;

/** What is known of a run, which `update` brings up to date. */
export class Run {
  constructor(number, folder) {
    Object.assign(this, { number, folder, state: {}, next: 0, steps: [], evaluations: [], numDamaged: 0 });
  }

  get name() {
    return this.isNamedAlike ? this.state.folder.split("/").slice(-2).join("/") : this.state.name ?? this.folder;
  }

  get isOver() {
    return ["completed", "failed", "interrupted"].includes(this.state.status);
  }

  /** Ask for what is new, and return whether anything is. */
  async update() {
    const before = JSON.stringify([this.next, this.state.status, this.state.num_rollouts]);
    do {
      this.state = await ask(`api/${this.number}/state?offset=${this.next}`);
      if (this.state.next < this.next) Object.assign(this, { steps: [], evaluations: [], numDamaged: 0 });
      this.next = this.state.next;
      this.numDamaged += this.state.num_damaged_rows;
      this.state.rows.forEach((row) => this.add(row));
    } while (this.state.more);
    return before !== JSON.stringify([this.next, this.state.status, this.state.num_rollouts]);
  }

  /** Add a row. After a crash steps are trained again: a step takes the place of those from it on. */
  add(row) {
    if (row.kind === "evaluation") this.evaluations.push(row);
    if ((row.kind ?? "step") !== "step") return;
    while (this.steps.length && this.steps.at(-1).step >= row.step) this.steps.pop();
    this.steps.push(row);
  }
}

export function showRuns(_place, runs) {
  const root = el("section.runs");
  let width = 0;
  const draw = () => {
    const held = root.querySelector("select")?.value;
    root.replaceChildren(...runs.map(summary), ...charts(runs, root, held, draw));
  };
  const observer = new ResizeObserver(() => {
    if (Math.abs(root.clientWidth - width) > 4) {
      width = root.clientWidth;
      draw();
    }
  });
  observer.observe(root);
  return {
    root,
    keys: { Enter: () => (location.hash = "#/rollouts/0") },
    refresh: (changed) => changed && !root.querySelector("select:focus") && draw(),
    end: () => observer.disconnect(),
  };
}

/** The evaluations of a run, `[row, success]`, by what was graded: the held-out tasks, and each benchmark. */
function graded(run) {
  const found = new Map();
  for (const row of run.evaluations) {
    for (const [name, value] of Object.entries(row)) {
      const [, benchmark] = name.match(/^eval\/(?:([^/]+)\/)?success$/) ?? [];
      const key = benchmark ?? (name === "eval/success" ? HELD_OUT : null);
      if (key != null && value != null) found.set(key, [...(found.get(key) ?? []), [row, value]]);
    }
  }
  return found;
}

function summary(run) {
  const last = run.steps.at(-1) ?? {}, sum = (name) => run.steps.reduce((total, row) => total + (row[name] ?? 0), 0);
  const successes = new Map([[HELD_OUT, []], ...graded(run)]);
  const figures = [
    ["status", run.state.status ?? "not begun"],
    ["step", last.step == null ? "–" : count(last.step)],
    ["reward", short(last["reward/mean"])],
    ...[...successes].map(([name, all]) => [`${name} success`, [...new Set([all[0], all.at(-1)])].map((one) => short(one?.[1])).join(" → ")]),
    ["rollouts", count(run.state.num_rollouts ?? 0)],
    ["tokens trained", short(sum("tokens/trained"))],
    ["time", duration(sum("seconds/wall"))],
  ];
  return el("article.summary", { title: run.folder },
    el("h2", {}, el(`i.mark.run${run.number % 6}`), word(run.name)),
    el("dl", {}, ...figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    run.numDamaged ? el("p.error", {}, `${run.numDamaged} rows of metrics.jsonl are damaged and left out`) : null);
}

function charts(runs, root, held, redraw) {
  const begun = runs.filter((run) => run.steps.length);
  if (!begun.length) return [el("p.empty", {}, "No train step is recorded yet. ", el("a", { href: "#/rollouts/0" }, "Its rollouts"))];
  const columns = root.clientWidth > 900 ? 2 : 1, width = Math.max(260, (root.clientWidth - 20 * (columns - 1)) / columns - 26);
  const from = Math.min(...begun.map((run) => run.steps[0].step)), to = Math.max(...begun.map((run) => run.steps.at(-1).step));
  const scale = { width, from, to, x: (step) => LEFT + ((step - from) / Math.max(1, to - from)) * (width - LEFT - RIGHT) };
  const names = [...new Set(begun.flatMap((run) => Object.keys(run.steps.at(-1))))].filter((name) => name.includes("/")).sort();
  const chosen = names.includes(held) ? held : "trainer/grad_norm";
  const choice = el("select", { "aria-label": "metric", onchange: redraw }, ...names.map((name) => el("option", { selected: name === chosen }, name)));
  return [
    el("div.charts", {},
      ...CURVES.map(([title, unit, ...metrics]) => curve(el("h3", {}, title, el("small", {}, unit)), metrics, begun, scale)),
      ...begun.flatMap((run) => SIDES.map(([side, title]) => times(run, side, runs.length > 1 ? `${title}: ${run.name}` : title, scale))),
      ...begun.map((run) => timeLine(run, runs.length > 1 ? `What happened: ${run.name}` : "What happened", scale)),
      curve(el("h3", {}, choice), [[chosen, chosen]], begun, scale)),
  ];
}

/** One row for each pixel or so: of many steps, the mean of those that share a place. */
function thinned(steps, value) {
  const size = Math.ceil(steps.length / MAX_POINTS), points = [];
  for (let at = 0; at < steps.length; at += size) {
    const known = steps.slice(at, at + size).filter((row) => value(row) != null);
    if (known.length) points.push([known.at(-1).step, known.reduce((sum, row) => sum + value(row), 0) / known.length]);
  }
  return points;
}

function curve(title, metrics, runs, scale) {
  const lines = runs.flatMap((run) => metrics.map(([name, label, style]) => ({
    run, label, style: style ?? "", points: thinned(run.steps, (row) => row[name]),
  })));
  const dots = metrics.some(([name]) => name === "reward/success")
    ? runs.flatMap((run) => [...graded(run)].flatMap(([name, all]) => all.map(([row, value]) => [run, row.step, value, name])))
    : [];
  const values = [...lines.flatMap((line) => line.points.map(([, y]) => y)), ...dots.map(([, , y]) => y)];
  const [low, high] = bounds([0, ...values]), top = high === low ? low + 1 : high;
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (top - low)) * (HEIGHT - TOP - BOTTOM);
  const picture = frame(scale, [low, (low + top) / 2, top].map((value) => [y(value), short(value)]));
  for (const { run, style, points } of lines) {
    const d = points.map(([step, value], at) => `${at ? "L" : "M"}${scale.x(step).toFixed(1)},${y(value).toFixed(1)}`).join("");
    picture.append(svg("path", { d, class: `line ${style} run${run.number % 6}` }));
    if (points.length === 1) picture.append(svg("circle", { cx: scale.x(points[0][0]), cy: y(points[0][1]), r: 2.5, class: `dot run${run.number % 6}` }));
  }
  for (const [run, step, value, name] of dots) {
    const tip = svg("title"), dot = svg("circle", { cx: scale.x(Math.max(step, scale.from)), cy: y(value), r: 4, class: `graded run${run.number % 6}` });
    tip.textContent = `${name} success ${short(value)}`;
    dot.append(tip);
    picture.append(dot);
  }
  const legend = [...metrics.map(([, label, style]) => [`key ${style ?? ""}`, label]), ...(dots.length ? [["key ring", [...new Set(dots.map(([, , , name]) => name))].join(", ")]] : [])];
  return chart(title, picture, legend, scale, runs, (run, row) => metrics.map(([name, label]) => `${label} ${short(row[name])}`));
}

/** The shares of one side's time by activity, stacked: what it did is below, what it waited for above. */
function times(run, side, title, scale) {
  const prefix = `seconds/${side}/`;
  const totals = new Map();
  for (const row of run.steps) {
    for (const name in row) if (name.startsWith(prefix)) totals.set(name, (totals.get(name) ?? 0) + row[name]);
  }
  const rank = (name) => { const at = BUSY.indexOf(name.slice(prefix.length)); return at < 0 ? BUSY.length : at; };
  const names = [...totals.keys()].filter((name) => totals.get(name) > 0).sort((a, b) => rank(a) - rank(b) || totals.get(b) - totals.get(a));
  const share = (row, name) => (row["seconds/wall"] ? (row[name] ?? 0) / row["seconds/wall"] : 0);
  const y = (value) => HEIGHT - BOTTOM - Math.min(1, value) * (HEIGHT - TOP - BOTTOM);
  const picture = frame(scale, [[y(0), "0"], [y(0.5), "50%"], [y(1), "100%"]]);
  const base = new Map();
  names.forEach((name, at) => {
    const points = thinned(run.steps, (row) => share(row, name));
    const upper = points.map(([step, value]) => [step, (base.get(step) ?? 0) + value]);
    const lower = points.map(([step]) => [step, base.get(step) ?? 0]).reverse();
    upper.forEach(([step, value]) => base.set(step, value));
    const d = [...upper, ...lower].map(([step, value], place) => `${place ? "L" : "M"}${scale.x(step).toFixed(1)},${y(value).toFixed(1)}`).join("") + "Z";
    picture.append(svg("path", { d, class: `area part${at % 8}` }));
  });
  const words = (name) => name.slice(prefix.length).replaceAll("_", " ");
  const legend = names.map((name, at) => [`key part${at % 8}`, words(name)]);
  const told = (_, row) => names.map((name) => `${words(name)} ${Math.round(100 * share(row, name))}%`);
  return chart(el("h3", {}, title), picture, legend, scale, [run], told);
}

/** Pushes, saves, evaluations and faults by step; the taller a push, the longer it stalled the engine. */
function timeLine(run, title, scale) {
  const longest = bounds([1e-9, ...run.steps.map((row) => row["push/stall_s"] ?? 0)])[1];
  const faults = (row) => Object.entries(row).filter(([name, value]) => FAULTS.test(name) && value > 0)
    .map(([name, value]) => `${name.split("/").slice(1).join(" ").replaceAll("_", " ")}: ${value}`);
  const results = (row) => [...graded({ evaluations: [row] })].map(([name, [[, value]]]) => (name === HELD_OUT ? "" : `${name} `) + short(value)).join(", ");
  const lanes = [
    ["pushes", run.steps.filter((row) => row["push/stall_s"] != null).map((row) => [row.step, row["push/stall_s"] / longest, `push, stall of ${short(row["push/stall_s"])} s`])],
    ["saves", run.state.saves.map((step) => [step, 1, "checkpoint"])],
    ["evaluations", run.evaluations.map((row) => [row.step, 1, `evaluation ${row.label ?? ""}: ${results(row)}`])],
    ["faults", [...run.steps.filter((row) => faults(row).length).map((row) => [row.step, 1, faults(row).join(", ")]),
      ...run.state.starts.slice(1).map((step) => [step, 1, "the run was resumed"])]],
  ];
  const room = (HEIGHT - TOP - BOTTOM) / lanes.length;
  const picture = frame(scale, []);
  lanes.forEach(([name, ticks], lane) => {
    const floor = TOP + (lane + 1) * room - 3;
    const label = svg("text", { x: LEFT, y: floor - room + 11, class: "lane" });
    label.textContent = `${name} ${ticks.length ? count(ticks.length) : "none"}`;
    picture.append(label, svg("line", { x1: LEFT, x2: scale.width - RIGHT, y1: floor, y2: floor, class: "grid" }));
    const step = Math.ceil(ticks.length / MAX_POINTS);
    for (const [at, tall, what] of ticks.filter((_, place) => place % step === 0)) {
      const x = scale.x(Math.max(at, scale.from)), tip = svg("title");
      tip.textContent = `step ${at}: ${what}`;
      picture.append(svg("line", { x1: x, x2: x, y1: floor, y2: floor - 2 - tall * (room - 16), class: `tick ${name}` }, tip));
    }
  });
  const told = (_, row) => [`push ${short(row["push/stall_s"])} s`, ...faults(row)];
  return chart(el("h3", {}, title), picture, [], scale, [run], told);
}

/** Axes: horizontal lines with their labels, and the steps below. */
function frame(scale, lines) {
  const picture = svg("svg", { viewBox: `0 0 ${scale.width} ${HEIGHT}`, width: scale.width, height: HEIGHT, role: "img" });
  for (const [y, label] of lines) {
    const text = svg("text", { x: LEFT - 6, y: y + 4, class: "axis left" });
    text.textContent = label;
    picture.append(svg("line", { x1: LEFT, x2: scale.width - RIGHT, y1: y, y2: y, class: "grid" }), text);
  }
  for (const step of new Set([scale.from, Math.round((scale.from + scale.to) / 2), scale.to])) {
    const text = svg("text", { x: scale.x(step), y: HEIGHT - 5, class: `axis ${step === scale.from ? "" : step === scale.to ? "left" : "middle"}` });
    text.textContent = step === scale.from ? `step ${count(step)}` : count(step);
    picture.append(text);
  }
  return picture;
}

/** A picture with its title and legend. Where the pointer is, the step's values are told; a click shows its rollouts. */
function chart(title, picture, legend, scale, runs, told) {
  const keys = legend.map(([kind, label]) => el("span", {}, el(`i.${kind.trim().replaceAll(" ", ".")}`), label));
  const line = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cross", visibility: "hidden" });
  const caption = el("figcaption", {}, ...keys);
  picture.append(line);
  const stepAt = (event) => {
    const x = ((event.clientX - picture.getBoundingClientRect().left) / picture.clientWidth) * scale.width;
    return Math.round(scale.from + ((x - LEFT) / (scale.width - LEFT - RIGHT)) * (scale.to - scale.from));
  };
  picture.addEventListener("pointermove", (event) => {
    const step = Math.max(scale.from, Math.min(scale.to, stepAt(event)));
    line.setAttribute("x1", scale.x(step));
    line.setAttribute("x2", scale.x(step));
    line.setAttribute("visibility", "visible");
    const values = runs.flatMap((run) => {
      const row = rowAt(run.steps, step);
      return row ? [el("span", {}, runs.length > 1 ? el(`i.mark.run${run.number % 6}`) : null, told(run, row).join(" · "))] : [];
    });
    caption.replaceChildren(el("b", {}, `step ${count(step)}`), ...values);
  });
  picture.addEventListener("pointerleave", () => {
    line.setAttribute("visibility", "hidden");
    caption.replaceChildren(...keys);
  });
  picture.addEventListener("click", (event) => {
    if (event.target.closest("svg")) location.hash = `#/rollouts/${runs[0].number}?step=${Math.max(scale.from, Math.min(scale.to, stepAt(event)))}`;
  });
  return el("figure", {}, title, picture, caption);
}

/** Find the row of a step in rows that are ordered by it. */
function rowAt(rows, step) {
  let low = 0, high = rows.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (rows[middle].step === step) return rows[middle];
    if (rows[middle].step < step) low = middle + 1;
    else high = middle - 1;
  }
  return null;
}
