// The page: which view an address names, the head above all views, the keyboard, and the news of runs that go on.
//
//   #/                              the runs side by side       #/rollout/N/SESSION      a rollout of run N
//   #/rollouts/N?status=error       rollouts of run N           #/tokens/N/SESSION/TURN  the tokens of a turn
//
// A view is made by a function (place, runs) and returns {root, keys, begin, refresh, end}, of which all but root may be left out.

import { ask, el, notify, word } from "./parts.js";
import { showRollouts } from "./rollouts.js";
import { Run, showRuns } from "./run.js";
import { showTrajectory } from "./trajectory.js";
import { showTokens } from "./tokens.js";

const POLL_MS = 2000;
const VIEWS = { __proto__: null, "": showRuns, rollouts: showRollouts, rollout: showTrajectory, tokens: showTokens };
const HELP = [
  ["j k", "next and previous"], ["Enter", "open"], ["Esc", "back"], ["/", "search"],
  ["n p", "next and previous sibling"], ["t", "tokens of a turn"], ["?", "these keys"],
];
const main = document.getElementById("main");
let runs = [], view = {}, shown = 0, isDown = false;

/** Read the address: the view's name, its run, further names, and what follows a question mark. */
function placeOf(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name, number = "0", ...rest] = path.split("/").map(decodeURIComponent);
  return { name, number: Number(number), run: runs[Number(number)], rest, search: Object.fromEntries(new URLSearchParams(search)) };
}

async function show() {
  const turn = ++shown;
  view.end?.();
  view = {};
  notify("");
  try {
    const place = placeOf(location.hash), make = VIEWS[place.name];
    drawHead(place);
    if (!make || !place.run) throw new Error("There is no such view; choose one above.");
    main.ariaBusy = "true"; // what was shown before is pale until this is here
    const made = await make(place, runs);
    if (turn !== shown) return;
    view = made;
    main.replaceChildren(view.root);
    main.focus({ preventScroll: true });
    view.begin?.();
  } catch (error) {
    if (turn === shown) fail(error);
  }
  if (turn === shown) main.ariaBusy = null;
}

const fail = (error) => main.replaceChildren(el("p.empty.error", { role: "alert" }, error.message));

function drawHead(place) {
  const links = runs.map((run, number) => {
    const isHere = place.name && place.number === number;
    return el("a", { href: `#/rollouts/${number}`, class: isHere ? "here" : null, title: run.folder },
      el(`i.mark.run${number % 6}`), word(run.name), runs.length === 1 ? " rollouts" : "");
  });
  document.getElementById("head").replaceChildren(
    el("a.home", { href: "#/", class: place.name ? null : "here" }, "Run" + (runs.length > 1 ? "s" : "")),
    el("nav", { "aria-label": "rollouts" }, ...links),
    el("button.quiet", { onclick: toggleHelp, title: "keys" }, "?"),
  );
  document.title = [place.rest[0], place.run?.name, "areal_agent"].filter(Boolean).join(" · ");
}

function toggleHelp() {
  const open = document.querySelector("dialog");
  if (open) return open.remove();
  const rows = HELP.map(([keys, what]) => el("tr", {}, el("td", {}, el("kbd", {}, keys)), el("td", {}, what)));
  const dialog = el("dialog", { onclose: () => dialog.remove(), onclick: () => dialog.remove() }, el("table", {}, ...rows));
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || (document.querySelector("dialog") && event.key !== "?")) return;
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || (event.key === "Enter" && event.target.matches("button, a, summary"))) return;
  const act = event.key === "?" ? toggleHelp : view.keys?.[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

/** Ask every run for its news, then the view, in a tenth of the time at most; a failure is said once and asked again. */
async function poll() {
  const begun = performance.now();
  if (!document.hidden) {
    try {
      const changed = (await Promise.all(runs.map((run) => run.update()))).some(Boolean);
      await view.refresh?.(changed);
      if (isDown) notify("");
      isDown = false;
    } catch (error) {
      isDown = error.name !== "AbortError"; // else the view was left meanwhile
      if (isDown) notify(error.message, true);
    }
  }
  setTimeout(poll, Math.max(POLL_MS, 9 * (performance.now() - begun)));
}

try {
  const folders = await ask("api/runs");
  runs = folders.map((folder, number) => new Run(number, folder));
  await Promise.all(runs.map((run) => run.update()));
  for (const run of runs) run.isNamedAlike = runs.some((other) => other !== run && other.state.name === run.state.name);
  window.addEventListener("hashchange", show);
  await show();
  setTimeout(poll, POLL_MS);
} catch (error) {
  fail(error);
}
