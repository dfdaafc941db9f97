// What all views are made of: elements, texts of strangers, numbers, calls to the server, and lists of any length.
//
// Every text reaches the page through `el`, as a text node and with its control characters written out, so that none of
// it is ever markup, moves other text, or hides.

const HIDDEN = /(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const MAX_CHARS = 4000, BLOCK_CHARS = 20000, MAX_WORD = 300;
export const exported = globalThis.EXPORTED; // the answers that an exported rollout carries

/** Write control characters and those that reorder text as their escapes. */
export const visible = (text) =>
  String(text).replace(HIDDEN, (one) => {
    const code = one.codePointAt(0).toString(16);
    return code.length > 4 ? `\\u{${code}}` : "\\u" + code.padStart(4, "0");
  });

/** Make an element. A name in `options` is an attribute, `on...` a listener; parts are elements or text. */
export function el(kind, options = {}, ...parts) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, visible(value));
  }
  made.append(...parts.flat().filter((one) => one != null && one !== "" && one !== false).map((one) => (one instanceof Node ? one : visible(one))));
  return made;
}

export function svg(tag, attributes = {}, ...parts) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...parts);
  return made;
}

/** A name or a short text of strangers within a line: whatever its direction and length, it stays in its place. */
export function word(text, kind = "bdi") {
  const whole = String(text ?? "");
  return el(kind, { dir: "auto" }, whole.length > MAX_WORD ? whole.slice(0, MAX_WORD) + "…" : whole);
}

/** A text of any length: a long one is cut, and shown whole in blocks that cost nothing off the screen. */
export function longText(text, kind = "div.text") {
  const box = el(kind, { dir: "auto" });
  const cut = text.length > MAX_CHARS * 1.5;
  box.append(visible(cut ? text.slice(0, MAX_CHARS) : text));
  if (!cut) return box;
  const more = el("button.more", { onclick: showAll }, `… show all ${count(text.length)} characters`);
  function showAll() {
    box.replaceChildren();
    for (let at = 0; at < text.length; at += BLOCK_CHARS) {
      box.append(el("div.block", { dir: "auto" }, text.slice(at, at + BLOCK_CHARS)));
    }
  }
  box.append(el("br"), more);
  return box;
}

/** The digest of the image that a part of a message refers to, if it does. */
export const digestOf = (part) => {
  return /^sha256:([0-9a-f]{64})$/.exec(part?.image_url?.url)?.[1];
};

/** An image of a run, or of an exported rollout. */
export const picture = (number, digest) => el("img.picture", {
  src: exported ? exported[""].images[digest] : `images/${number}/${digest}`, alt: `image ${digest.slice(0, 12)}`, loading: "lazy",
});

/** The colour of how a rollout ended. */
export const tone = (one) =>
  one.status == null ? "pending" : one.reward == null || one.status !== "completed" ? "failed" : one.reward > 0 ? "good" : "bad";

export const count = (number) => Number(number).toLocaleString("en-US");

/** A number in few characters: 0.0312, 1.25, 340, 12.5k. */
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(3));
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The lowest and the highest of any number of values; each other where there is none. */
export const bounds = (values) =>
  values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);

/** Ask the server; an error is thrown with the line that it answered. */
export async function ask(path, signal) {
  if (exported) return exported[new URLSearchParams(path.split("?")[1]).get("turn") ?? ""];
  let reply;
  try {
    reply = await fetch(path, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server has ended; start `python -m areal_agent.view` again.");
  }
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

export const query = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value != null)).toString();

export function notify(text, isError = false) {
  const box = document.getElementById("notice");
  clearTimeout(notify.timer);
  box.hidden = !text;
  box.className = isError ? "error" : "";
  box.textContent = visible(text ?? "");
  if (text && !isError) notify.timer = setTimeout(() => notify(""), 2500);
}

/** A button that copies a text; `make` is called when it is pressed. */
export function copier(label, make, title) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(await make());
      notify(`${label} is copied`);
    } catch (error) {
      notify(`The browser did not copy: ${error.message}`, true);
    }
  };
  return el("button.quiet", { onclick: copy, title }, label);
}

/** Rows of equal height, of which only those in sight exist. `row(index)` makes one; `near` is called at the end. */
export class VirtualList {
  constructor(box, height, row, near = () => {}) {
    Object.assign(this, { box, height, row, near, length: 0, selected: -1, shown: new Map() });
    this.space = el("div.space");
    box.replaceChildren(this.space);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  /** Say how many rows there are, and whether those that were drawn have changed. */
  resize(length, changed = false) {
    this.length = length;
    if (changed) this.clear();
    this.space.style.height = `${length * this.height}px`;
    this.draw();
  }

  clear() {
    for (const one of this.shown.values()) one.remove();
    this.shown.clear();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.height) - 10);
    const end = Math.min(this.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.height) + 10);
    for (const [index, one] of this.shown) {
      if (index < first || index >= end) {
        one.remove();
        this.shown.delete(index);
      }
    }
    for (let index = first; index < end; index++) {
      if (this.shown.has(index)) continue;
      const one = this.row(index);
      one.style.top = `${index * this.height}px`;
      one.classList.toggle("selected", index === this.selected);
      this.shown.set(index, one);
      this.space.append(one);
    }
    if (end > this.length - 60) this.near();
  }

  select(index) {
    this.shown.get(this.selected)?.classList.remove("selected");
    this.selected = Math.max(0, Math.min(index, this.length - 1));
    const top = this.selected * this.height;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.height > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = top + this.height - this.box.clientHeight;
    }
    this.draw();
    this.shown.get(this.selected)?.classList.add("selected");
  }
}
