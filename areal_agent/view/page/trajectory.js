// One rollout: what became of it, its siblings, and its turns as a conversation. A branch is set in, with its reason.

import { ask, bounds, copier, count, digestOf, duration, el, exported, longText, picture, short, tone, word } from "./parts.js";

const MAX_INDENT = 4;
const LABELS = { tool: "result" };

export async function showTrajectory(place) {
  const { run, number, rest: [session, turn] } = place;
  const path = `api/${number}/rollout?session=${encodeURIComponent(session)}`;
  const view = new Trajectory(run, number, session, path, await ask(path));
  view.begin = () => turn && view.go(view.data.turns.findIndex((one) => one.id === turn));
  return view;
}

class Trajectory {
  constructor(run, number, session, path, data) {
    Object.assign(this, { run, number, session, path, data, at: -1, root: el("section.trajectory") });
    this.keys = {
      j: () => this.go(this.at + 1), k: () => this.go(this.at - 1),
      n: () => this.sibling(1), p: () => this.sibling(-1),
      t: () => this.openTokens(), Enter: () => this.openTokens(),
      Escape: () => exported || (location.hash = run.listed?.place ?? `#/rollouts/${number}`),
    };
    this.draw();
  }

  draw() {
    const { data } = this, lanes = lanesOf(data.turns);
    this.cards = data.turns.map((turn, index) => this.turn(turn, index, Math.min(lanes[index], MAX_INDENT)));
    this.root.replaceChildren(this.heading(), this.values(), this.outline(), el("div.turns", {}, ...this.cards));
    if (!data.turns.length) this.root.append(el("p.empty", {}, "The model was not called yet."));
  }

  heading() {
    const { data } = this, parts = Object.entries(data.rewards.parts);
    const facts = [
      ["status", data.status ?? "open"], ["reward", data.reward == null ? "none" : short(data.reward)],
      ...parts.map(([name, value]) => [`part ${name}`, short(value)]),
      ["fate", data.fate], data.num_loss_tokens == null ? null : ["in the loss", `${count(data.num_loss_tokens)} tokens of step ${data.leased_step}`],
      ["sampled", `${count(data.num_sampled_tokens)} tokens in ${data.turns.length} turns`],
      ["time", data.ended_s ? duration(data.ended_s - data.started_s) : "open"],
      ...Object.entries(data.logged).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]),
    ].filter(Boolean);
    const link = (one) => el(`a.sibling.${tone(one)}`, {
      href: `#/rollout/${this.number}/${encodeURIComponent(one.session_id)}`, title: `${one.session_id}: ${one.fate}`,
      "aria-current": one.session_id === data.session_id ? "true" : null,
    }, one.outcome);
    return el("header", {},
      el("h2", {}, word(data.session_id)),
      el("p.dim", {}, "task ", word(data.task_id), " · group ", exported ? word(data.group_id) : el("a", { href: `#/rollouts/${this.number}?group=${encodeURIComponent(data.group_id)}` }, word(data.group_id))),
      el("dl", {}, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, word(name)), el("dd", {}, word(value))))),
      data.error ? longText(data.error, "div.text.error") : null,
      data.siblings.length > 1 && !exported ? el("p.siblings", {}, "siblings ", ...data.siblings.map(link),
        data.num_siblings > data.siblings.length ? ` of ${count(data.num_siblings)}` : "") : null,
      exported ? null : el("p.actions", {},
        copier("link", () => location.href), copier("JSON", () => JSON.stringify(data, null, 2)),
        el("a.button.quiet", { href: `export/${this.number}?session=${encodeURIComponent(this.session)}`, download: true, title: "this rollout as one file" }, "export"),
        copier("curl", () => `curl '${new URL(this.path, document.baseURI).href}'`, "a command that fetches this rollout as JSON")));
  }

  /** The mean reward of fresh samples after each turn, and the turn that lost the most. */
  values() {
    const { values } = this.data;
    if (!values) return "";
    const recorded = values.recorded == null ? [] : [{ turn: values.num_turns, mean: values.recorded }];
    const known = [...values.values, ...recorded].filter((one) => one.mean != null), [least, most] = bounds(known.map((one) => one.mean));
    const row = ({ turn, mean, low, high, rewards }) => el("tr", { class: turn === values.lost_at ? "bad" : null },
      el("td", {}, turn ? el("button.quiet", { onclick: () => this.go(turn - 1) }, `after turn ${turn}`) : "at the beginning"),
      el("td", {}, el("meter", { min: Math.min(0, least), max: Math.max(most, 1), value: mean })), el("td", {}, short(mean)),
      el("td.dim", {}, rewards ? `${short(low)} to ${short(high)}, ${rewards.length} samples` : "as recorded"),
      el("td", {}, turn === values.lost_at ? "lost here" : ""));
    return el("table.values", {}, el("caption", {}, "value: mean reward of fresh answers by ", word(values.engine)), ...known.map(row));
  }

  /** The numbers of the turns; of very many, branches and every fiftieth. */
  outline() {
    const { turns } = this.data, isNamed = (turn, index) => turns.length < 200 || isBranch(turn) || index % 50 === 49;
    if (turns.length < 3) return "";
    return el("nav.outline", { "aria-label": "turns" }, ...turns.map((turn, index) => isNamed(turn, index) &&
      el("button.quiet", { onclick: () => this.go(index), title: turn.place }, `${isBranch(turn) ? "↳ " : ""}${index + 1}`)));
  }

  turn(turn, index, lane) {
    const heading = el("h3", {}, `turn ${index + 1}`, turn.place ? el(isBranch(turn) ? "span.branch" : "span.dim", {}, turn.place) : null,
      el("span.dim", {}, `${count(turn.num_prompt_tokens)} new prompt tokens · ${duration(turn.ended_s - turn.started_s)}`),
      el("span.actions", {},
        el("a.button.quiet", { href: `#/tokens/${this.number}/${encodeURIComponent(this.session)}/${encodeURIComponent(turn.id)}` }, "tokens"),
        exported ? null : copier("link", () => new URL(`#/rollout/${this.number}/${encodeURIComponent(this.session)}/${encodeURIComponent(turn.id)}`, location.href).href),
        copier("JSON", () => JSON.stringify(turn, null, 2)),
        turn.answers.some((one) => one.message) ? copier("curl", () => this.request(turn), "a command that sends this turn's request to $OPENAI_BASE_URL, without its tool definitions: they are not recorded") : null));
    const [known, numKnown] = turn.known;
    const card = el("article.turn", { class: `turn lane${lane}`, id: `turn-${index}` }, heading,
      numKnown ? el("p.dim", {}, `its first ${numKnown} messages are those of turn ${known + 1}`) : null,
      ...turn.messages.slice(numKnown).flatMap((one) => message(one, this.number)));
    turn.answers.forEach((answer, number) => {
      const label = turn.answers.length > 1 ? `answer ${number + 1}` : "answer";
      card.append(...(answer.message ? message(answer.message, this.number, label)
        : [block(label, "answer", el("div.dim", {}, `${count(answer.num_tokens)} tokens; --tokenizer FOLDER shows their text`))]), facts(answer));
    });
    return card;
  }

  /** A request with the whole conversation that a turn answered. */
  request(turn) {
    const messages = [];
    const byAnswer = new Map(this.data.turns.flatMap((one) => one.answers.map((answer) => [answer.id, [one, answer]])));
    for (let one = turn; one; ) {
      messages.unshift(...one.messages);
      const [before, answer] = byAnswer.get(one.parent) ?? [];
      if (answer) messages.unshift(answer.message);
      one = before;
    }
    const { temperature, top_p, max_tokens, stop } = turn.sampling;
    const isChat = messages[0]?.role !== "prompt", n = turn.answers.length > 1 ? turn.answers.length : undefined;
    const asked = isChat ? { messages } : { prompt: messages[0].content };
    const body = JSON.stringify({ model: "default", ...asked, temperature, top_p, max_tokens, n, stop: stop.length ? stop : undefined });
    return `curl "$OPENAI_BASE_URL/${isChat ? "chat/" : ""}completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
 -H "Content-Type: application/json" --data-binary @- <<'END'\n${body}\nEND\n`; // JSON has no line breaks of its own
  }

  go(index) {
    if (!this.cards.length) return;
    this.cards[this.at]?.classList.remove("selected");
    this.at = Math.max(0, Math.min(index, this.cards.length - 1));
    this.cards[this.at].classList.add("selected");
    this.cards[this.at].scrollIntoView({ block: "start" });
  }

  openTokens() {
    const turn = this.data.turns[Math.max(0, this.at)];
    if (turn) location.hash = `#/tokens/${this.number}/${encodeURIComponent(this.session)}/${encodeURIComponent(turn.id)}`;
  }

  sibling(by) {
    const place = this.data.siblings.findIndex((one) => one.session_id === this.data.session_id);
    const other = this.data.siblings[place + by];
    if (other) location.hash = `#/rollout/${this.number}/${encodeURIComponent(other.session_id)}`;
  }

  /** While the rollout goes on, show the turns that have come. */
  async refresh() {
    const isOver = /^(trained|dropped)/.test(this.data.fate) || (this.data.ended_s && this.data.purpose === "eval");
    if (isOver || this.wasOver) return;
    this.wasOver = this.run.isOver;
    const data = await ask(this.path);
    if (JSON.stringify(data) === JSON.stringify(this.data)) return;
    this.data = data;
    this.draw();
    this.cards[this.at]?.classList.add("selected");
  }
}

const isBranch = (turn) => turn.place.startsWith("branch");

/** How deep each turn is set in: a branch more than what it branches from, unless only its template made it one. */
function lanesOf(turns) {
  const depths = new Map([[null, 0]]); // by answer
  return turns.map((turn) => {
    const depth = depths.get(turn.parent) + (isBranch(turn) && !turn.fork_reason?.startsWith("template_") ? 1 : 0);
    turn.answers.forEach((one) => depths.set(one.id, depth));
    return depth;
  });
}

/** The blocks of a message: its reasoning, its text, its calls. */
function message(one, number, label = LABELS[one.role] ?? one.role) {
  const calls = (one.tool_calls ?? []).map((call) => call.function ?? call), text = textOf(one.content);
  return [
    one.reasoning_content ? block("reasoning", "reasoning", longText(String(one.reasoning_content))) : null,
    text || !calls.length ? block(label, one.role, hasImage(one.content) ? el("div", {}, ...shownParts(one.content, number)) : longText(text)) : null,
    ...calls.map((call) => block("call", "call", el("div", {}, el("b", {}, word(call.name ?? "")), ...given(call.arguments)))),
  ].filter(Boolean);
}

const block = (label, kind, content) => el(`div.message.${/^[a-z]+$/.test(kind) ? kind : "other"}`, {}, el("span.label", {}, word(label)), content);

const hasImage = (content) => Array.isArray(content) && content.some(digestOf);
const shownParts = (parts, number) => parts.map((part) => (digestOf(part) ? picture(number, digestOf(part)) : longText(textOf([part]))));

/** The arguments of a call by name, each as a text; what is no object is shown as it is. */
function given(written) {
  let values = written;
  try {
    values = typeof written === "string" ? JSON.parse(written) : written;
  } catch { /* it is shown as it was written */ }
  if (!values || typeof values !== "object") return values == null ? [] : [longText(String(values), "div.text.mono")];
  return Object.entries(values).flatMap(([name, value]) => [el("span.argument", {}, word(name)), longText(textOf(value), "div.text.mono")]);
}

/** The content of a message as text: parts of text one after the other, anything else as JSON. */
function textOf(content) {
  if (content == null || typeof content === "string") return content ?? "";
  if (Array.isArray(content) && content.every((part) => typeof part?.text === "string")) return content.map((part) => part.text).join("");
  return JSON.stringify(content, null, 2);
}

function facts(answer) {
  const versions = answer.versions.map(([version, start, end]) => `${count(end - start)} by ${version}`).join(", ");
  return el("p.facts", {},
    `${count(answer.num_tokens)} tokens (${versions || "of no version"})`, el("span", {}, answer.finish_reason), el("span", {}, answer.distribution),
    answer.versions.length > 1 ? el("span.warn", {}, `interrupted ${answer.versions.length - 1}×`) : null,
    answer.logprob == null ? null : el("span", {}, `mean logprob ${answer.logprob.toFixed(3)}`),
    answer.reward == null ? null : el("span", {}, `reward ${short(answer.reward)}`),
    answer.advantage == null ? null : el("span", {}, `credit ${short(answer.advantage)}`),
    el(`span.${answer.loss === "in the loss" ? "good" : "warn"}`, {}, answer.loss));
}
