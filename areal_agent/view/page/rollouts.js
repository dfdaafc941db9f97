// The rollouts of a run, the newest first, those for evaluation after all others: filters, a search through what was
// said, and rows that load as one scrolls.

import { VirtualList, ask, count, duration, el, query, tone, word } from "./parts.js";

const MAX_SEARCHED = 10000;
const ROW_HEIGHT = 30;
const STATUSES = ["open", "completed", "missing_reward", "rejected", "infra", "error", "timeout", "cancelled", "orphan"];
const FATES = ["open", "waiting", "leased", "trained", "dropped", "stale", "filtered", "altered", "rejected",
  "missing_reward", "infra", "error", "orphan", "evaluation"];
const FIELDS = [
  ["text", "search", "text in the newest 10,000"], ["status", STATUSES], ["fate", FATES], ["purpose", ["train", "eval"]], ["tool", "text", "tool called"],
  ["least_reward", "number", "reward ≥"], ["most_reward", "number", "reward ≤"],
  ["least_tokens", "number", "tokens ≥"], ["most_tokens", "number", "tokens ≤"],
  ["step", "number", "step"], ["version", "number", "weights of step"], ["task", "text", "task"], ["group", "text", "group"],
];

/** The rollouts that an address asks for; those that were left last are shown as they were left. */
export function showRollouts({ run, number, search }) {
  if (run.listed?.place !== location.hash) run.listed = new Rollouts(run, number, search);
  return run.listed;
}

/** What is read of a list, and for what purposes there is more: training comes first. */
function nothingRead({ purpose, fate }) {
  const only = purpose ?? (fate && (fate === "evaluation" ? "eval" : "train"));
  return { rows: [], cursor: "", numRead: 0, numFurther: 0, isDone: false, purposes: only ? [only] : ["train", "eval"] };
}

class Rollouts {
  constructor(run, number, filters) {
    Object.assign(this, { run, number, filters, place: location.hash, loading: null, top: 0 }, nothingRead(filters));
    this.note = el("span.dim");
    this.box = el("div.rows", { tabindex: 0, "aria-label": "rollouts" });
    this.root = el("section.rollout-list", {}, this.form(), this.heading(), this.box);
    this.list = new VirtualList(this.box, ROW_HEIGHT, (index) => this.row(this.rows[index]), () => this.load());
    this.keys = {
      j: () => this.list.select(this.list.selected + 1),
      k: () => this.list.select(this.list.selected - 1),
      Enter: () => this.rows[this.list.selected] && (location.hash = this.link(this.rows[this.list.selected])),
      "/": () => this.root.querySelector("input[name=text]").focus(),
      Escape: () => (location.hash = "#/"),
    };
  }

  form() {
    const inputs = FIELDS.map(([name, kind, hint]) =>
      Array.isArray(kind)
        ? el("select", { name, "aria-label": name }, el("option", { value: "" }, `any ${name}`),
            ...kind.map((one) => el("option", { value: one, selected: this.filters[name] === one }, one)))
        : el("input", { name, type: kind === "search" ? kind : "text", placeholder: hint, "aria-label": hint, value: this.filters[name], maxlength: 2000, inputmode: kind === "number" ? "decimal" : null }));
    const apply = () => {
      const given = query(Object.fromEntries(inputs.map((one) => [one.name, one.value.trim()])));
      const place = `#/rollouts/${this.number}${given && "?" + given}`;
      if (place !== location.hash) return void (location.hash = place);
      this.run.listed = null; // look again
      window.dispatchEvent(new HashChangeEvent("hashchange"));
    };
    const submit = (event) => { event.preventDefault(); apply(); };
    const changed = (event) => event.target.matches("select") && apply();
    const clear = el("a.button", { href: `#/rollouts/${this.number}` }, "clear");
    return el("form.filters", { onsubmit: submit, onchange: changed }, ...inputs,
      el("button", {}, "find"), Object.keys(this.filters).length ? clear : null, this.note);
  }

  heading() {
    const names = ["rollout", "reward", "siblings", "fate", "step", "weights", "turns", "tokens", "time", "task"];
    return el("div.row.heading", {}, ...names.map((name) => el(`span.${name}`, {}, name)));
  }

  link(one) {
    return `#/rollout/${this.number}/${encodeURIComponent(one.session_id)}`;
  }

  row(one) {
    const rewards = Object.entries(one.siblings);
    const said = one.excerpt || one.error || "";
    return el("a.row", { href: this.link(one) },
      el("span.rollout", { title: one.session_id }, word(one.session_id)),
      el(`span.reward.${tone(one)}`, {}, one.outcome),
      el("span.siblings", { title: rewards.map(([id, reward]) => `${id}: ${reward ?? "none"}`).join("\n") },
        ...rewards.slice(0, 16).map(([id, reward]) =>
          el(`i.${id === one.session_id ? "self." : ""}${reward == null ? "none" : reward > 0 ? "good" : "bad"}`))),
      el("span.fate", {}, one.purpose === "eval" ? "evaluation" : one.fate),
      el("span.step", {}, one.leased_step ?? ""),
      el("span.weights", {}, one.versions ? [...new Set(one.versions)].join("–") : ""),
      el("span.turns", {}, one.num_turns),
      el("span.tokens", {}, count(one.num_sampled_tokens)),
      el("span.time", {}, one.ended_s ? duration(one.ended_s - one.started_s) : "open"),
      el("span.task", {}, word(one.task_id), said && word(said, "em")));
  }

  /** Load the next page, and those after it while they hold nothing that was asked for. */
  load() {
    if (this.isDone || this.loading) return this.loading;
    this.loading = this.read().finally(() => (this.loading = null));
    return this.loading;
  }

  async read() {
    const isSearch = this.filters.text || this.filters.tool, wanted = this.rows.length + 100;
    while (!this.isDone && this.rows.length < wanted) {
      try {
        await this.next(this);
      } catch (error) {
        if (error.name === "AbortError") return;
        this.isDone = true;
        this.note.className = "error";
        this.note.textContent = error.message;
        return;
      }
      this.isDone ||= isSearch && this.numRead >= MAX_SEARCHED;
      this.say(isSearch);
      this.list.resize(this.rows.length);
    }
  }

  /** Read the next page into `list`. */
  async next(list) {
    const filters = { ...this.filters, purpose: list.purposes[0], cursor: list.cursor };
    const page = await ask(`api/${this.number}/rollouts?${query(filters)}`, this.stop.signal);
    list.numFurther += list.cursor ? 1 : 0;
    list.rows.push(...page.rollouts);
    list.numRead += page.num_read;
    const isEnd = page.cursor.every((one) => one === 0);
    list.cursor = isEnd ? "" : page.cursor.join(",");
    if (isEnd) list.purposes.shift();
    list.isDone = !list.purposes.length;
  }

  say(isSearch) {
    const more = this.isDone ? "" : "+";
    const found = `${count(this.rows.length)}${more} of ${count(this.run.state.num_rollouts)} rollouts`;
    this.note.textContent = isSearch ? `${found}; ${count(this.numRead)} read` : found;
  }

  /**
   * While the newest rollouts are in sight, show those that have come, and how the others went on. A search, and a
   * filter that leaves too little of one page, are asked again by "find" only.
   */
  async refresh() {
    const isDear = this.filters.text || this.filters.tool || (this.numFurther && Object.keys(this.filters).length);
    if (this.box.scrollTop > ROW_HEIGHT || isDear || this.loading) return;
    const { status, num_rollouts } = this.run.state, stand = `${status} ${num_rollouts}`;
    if (this.run.isOver && this.seen === stand) return;
    this.seen = stand;
    const fresh = nothingRead(this.filters);
    while (!fresh.isDone && fresh.rows.length < 100) await this.next(fresh);
    const selected = this.rows[this.list.selected]?.session_id;
    Object.assign(this, fresh);
    this.list.selected = this.rows.findIndex((one) => one.session_id === selected);
    this.say(false);
    this.list.resize(this.rows.length, true);
  }

  begin() {
    this.stop = new AbortController();
    this.box.scrollTop = this.top;
    this.list.draw(); // which loads, where it comes to the end
  }

  end() {
    this.top = this.box.scrollTop;
    this.stop.abort();
  }
}
