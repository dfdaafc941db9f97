// The tokens of one turn: as text, coloured by what is known of them, and as a table.

import { VirtualList, ask, bounds, copier, count, el, exported, short, visible, word } from "./parts.js";

const MAX_SPANS = 4000, MAX_PROMPT = 1000, ROW_HEIGHT = 24, NUM_SHADES = 7;
const MEASURES = { // name: [what a token has, the value at full colour, whether it has two sides]
  "engine's log-probability": [(one) => one.logprob, -5, false],
  "trainer's log-probability": [(one) => one.trainer, -5, false],
  "trainer minus engine": [(one) => (one.trainer == null ? null : one.trainer - one.logprob), 0.5, true],
  "ratio": [(one) => (one.ratio == null ? null : one.ratio - 1), 0.2, true],
  "advantage": [(one) => one.advantage, null, true],
  "weight version": [null],
  "in the loss": [null],
};

export async function showTokens(place) {
  const { number, search: { by }, rest: [session, turn] } = place;
  const path = `api/${number}/tokens?session=${encodeURIComponent(session)}&turn=${encodeURIComponent(turn)}`;
  return new Tokens(number, session, path, by, await ask(path));
}

class Tokens {
  constructor(number, session, path, by, data) {
    Object.assign(this, { number, session, path, data, tokens: tokensOf(data) });
    this.numPrompt = this.tokens.filter((one) => one.part === "prompt").length;
    this.versions = [...new Set(this.tokens.map((one) => one.version))].filter(Boolean);
    this.measure = el("select", { "aria-label": "colour by", onchange: () => this.choose() },
      ...Object.keys(MEASURES).map((name) => el("option", { selected: name === by }, name)));
    this.flow = el("div.flow", { dir: "ltr" });
    this.legend = el("p.legend.dim");
    this.box = el("div.rows", { tabindex: 0, "aria-label": "tokens" });
    this.list = new VirtualList(this.box, ROW_HEIGHT, (index) => this.row(index));
    this.root = el("section.token-view", {}, this.heading(), this.flow, el("div.table", {}, this.columns(), this.box));
    this.keys = {
      j: () => this.select(this.list.selected < 0 ? this.numPrompt : this.list.selected + 1), k: () => this.select(this.list.selected - 1),
      n: () => this.turn(1), p: () => this.turn(-1), Escape: () => (location.hash = this.back()),
    };
    const first = this.tokens.length > MAX_SPANS ? Math.max(0, this.numPrompt - MAX_PROMPT) : 0;
    this.drawFlow(first, first + MAX_SPANS);
    this.list.resize(this.tokens.length);
  }

  /** What was sampled is in sight first. */
  begin() {
    this.box.scrollTop = this.numPrompt * ROW_HEIGHT;
    const answer = this.spans[this.numPrompt - this.first];
    if (answer) this.flow.scrollTop = answer.offsetTop - this.flow.offsetTop - this.flow.clientHeight / 2;
  }

  /** The address has the measure, too. */
  choose() {
    history.replaceState(null, "", this.place(this.data.turn));
    this.paint();
  }

  place(turn) {
    return `#/tokens/${this.number}/${encodeURIComponent(this.session)}/${encodeURIComponent(turn)}?by=${encodeURIComponent(this.measure.value)}`;
  }

  back() {
    return `#/rollout/${this.number}/${encodeURIComponent(this.session)}/${encodeURIComponent(this.data.turn)}`;
  }

  turn(by) {
    const id = this.data.beside[by < 0 ? 0 : 1];
    if (id) location.hash = this.place(id);
  }

  heading() {
    const numSeen = this.tokens.filter((one) => one.trainer != null).length;
    return el("header", {},
      el("h2", {}, el("a", { href: this.back() }, word(this.session)), ` turn ${this.data.number} of ${this.data.num_turns}`),
      el("p.dim", {}, this.data.fork_at ? `${count(this.data.fork_at)} tokens of earlier turns come before these. ` : "",
        numSeen ? `The trainer's values of ${count(numSeen)} tokens were kept.`
          : "What the trainer saw was not kept for this rollout (observe.token_records keeps it for a share of them)."),
      el("p.actions", {}, el("label", {}, "colour by ", this.measure), this.legend,
        exported ? null : copier("link", () => location.href), copier("JSON", () => JSON.stringify(this.data)),
        exported ? null : copier("curl", () => `curl '${new URL(this.path, document.baseURI).href}'`)));
  }

  /** Show the text of the tokens from one to another; where other weights went on within an answer, a mark says which. */
  drawFlow(first, end) {
    this.first = first;
    this.spans = this.tokens.slice(first, end).map((one, at) =>
      el("span.token", { onclick: () => this.select(first + at), title: told(one) }, shown(one.text)));
    const whole = el("button.more", { onclick: () => this.drawFlow(0, Infinity) }, `… show all ${count(this.tokens.length)} tokens`);
    const parts = first ? [whole] : [];
    this.spans.forEach((span, at) => {
      const one = this.tokens[first + at], before = at ? this.tokens[first + at - 1] : null;
      if (one.part !== before?.part) parts.push(el("span.label", {}, one.part));
      else if (one.version !== before?.version) parts.push(el("span.push", {}, `⟂ weights ${one.version}`));
      parts.push(span);
      if (one.text.includes("\n")) parts.push(el("br"));
    });
    if (!first && this.tokens.length > end) parts.push(whole);
    this.flow.replaceChildren(...parts);
    this.paint();
  }

  /** Colour the tokens by the chosen measure; those without a value have no colour. */
  paint() {
    const name = this.measure.value, [value, bound, hasSides] = MEASURES[name];
    const values = value ? this.tokens.map(value) : [];
    const full = bound ?? bounds([1e-9, ...values.map((one) => Math.abs(one ?? 0))])[1];
    this.spans.forEach((span, at) => {
      const index = this.first + at, one = this.tokens[index];
      let shade = "";
      if (name === "weight version") shade = one.version ? `version${this.versions.indexOf(one.version) % 6}` : "";
      else if (name === "in the loss") shade = one.loss == null ? "" : one.loss === "in the loss" ? "high4" : "low4";
      else if (values[index] != null) {
        const size = Math.min(NUM_SHADES, Math.round(Math.abs(values[index] / full) * NUM_SHADES));
        shade = size ? `${hasSides && values[index] > 0 ? "high" : "low"}${size}` : "zero";
      }
      span.className = `token ${shade}`;
    });
    const present = values.filter((one) => one != null), [least, most] = bounds(present);
    this.legend.textContent = name === "weight version" ? this.versions.join(", ")
      : name === "in the loss" ? "green is in the loss, red is not"
      : present.length ? `${short(least)} to ${short(most)}; full colour at ${short(full)}` : "no token has it";
  }

  columns() {
    const names = ["", "id", "text", "engine", "trainer", "ratio", "advantage", "weights", "loss"];
    return el("div.row.heading", {}, ...names.map((name, at) => el(`span.column${at}`, {}, name)));
  }

  row(index) {
    const one = this.tokens[index];
    const values = [one.at, one.id, shown(one.text), fixed(one.logprob), fixed(one.trainer), fixed(one.ratio), fixed(one.advantage), one.version ?? "", one.loss ?? one.part];
    return el("div.row", { onclick: () => this.select(index) }, ...values.map((value, at) => el(`span.column${at}`, {}, at === 2 ? word(value) : value)));
  }

  select(index) {
    this.spans[this.list.selected - this.first]?.classList.remove("selected");
    this.list.select(index);
    this.spans[this.list.selected - this.first]?.classList.add("selected");
    this.spans[this.list.selected - this.first]?.scrollIntoView({ block: "nearest" });
  }
}

/** One record for each token of the turn, in order: those of its prompt, then those of its answers. Those of an image have one. */
function tokensOf({ prompt, answers }) {
  const images = new Map(prompt.images.map(({ start, end }) => [start, end])), all = [];
  let at = 0; // in the turn
  while (at < prompt.ids.length) {
    const id = prompt.ids[at], end = images.get(at);
    all.push({ at, id, text: end ? `‹image ${end - at} tokens›` : prompt.texts[at] ?? `‹${id}›`, part: "prompt" });
    at = Math.max(end ?? 0, at + 1);
  }
  answers.forEach((answer, number) => {
    const part = answers.length > 1 ? `answer ${number + 1}` : "answer", begin = all.length;
    const places = new Map(answer.seen?.places.map((place, at) => [place, at]));
    answer.ids.forEach((id, index) => all.push({
      at: at++, id, text: answer.texts[index] ?? `‹${id}›`, part, logprob: answer.logprobs[index],
      loss: index < answer.num_too_old ? "not in the loss: too old" : answer.num_too_old ? "in the loss" : answer.loss, ...seen(answer, places.get(index), index),
    }));
    for (const [version, start, end] of answer.versions) {
      for (let index = start; index < end; index++) all[begin + index].version = version;
    }
  });
  return all;
}

/** What the trainer saw of a token, where that was kept. */
function seen({ seen, num_too_old, loss }, at, index) {
  if (at == null) return seen && index >= num_too_old && loss.startsWith("in the loss") ? { loss: "not in the loss: left out by the step" } : {};
  const trainer = seen.logprobs[at];
  return { trainer, ratio: Math.exp(trainer - seen.proximal[at]), advantage: seen.advantages[at], loss: "in the loss" };
}

const fixed = (value) => (value == null ? "" : value.toFixed(4));
const shown = (text) => (text === "" ? "·" : visible(text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")).replace(/^ | $/g, "␣"));
const told = (one) => [`id ${one.id}`, one.logprob == null ? null : `engine ${fixed(one.logprob)}`, one.trainer == null ? null : `trainer ${fixed(one.trainer)}`,
  one.advantage == null ? null : `advantage ${short(one.advantage)}`, one.version && `weights ${one.version}`, one.loss].filter(Boolean).join("\n");
