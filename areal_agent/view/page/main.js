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
const VIEWS = { "": showRuns, rollouts: showRollouts, rollout: showTrajectory, tokens: showTokens };
const HELP = [
  ["j k", "next and previous"], ["Enter", "open"], ["Esc", "back"], ["/", "search"],
  ["n p", "next and previous sibling"], ["t", "tokens of a turn"], ["?", "these keys"],
];
const main = document.getElementById("main");
let runs = [], view = {}, shown = 0;

/** Read the address: the view's name, its run, further names, and what follows a question mark. */
function placeOf(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name, number = "0", ...rest] = path.split("/").map(decodeURIComponent);
  return { name, number: Number(number), run: runs[number], rest, search: Object.fromEntries(new URLSearchParams(search)) };
}

async function show() {
  const place = placeOf(location.hash), make = VIEWS[place.name], turn = ++shown;
  view.end?.();
  view = {};
  notify("");
  drawHead(place);
  if (!make || !place.run) return main.replaceChildren(el("p.empty", {}, "There is no such view; choose one above."));
  try {
    const made = await make(place, runs);
    if (turn !== shown) return made.end?.();
    view = made;
    main.replaceChildren(view.root);
    main.focus({ preventScroll: true });
    view.begin?.();
  } catch (error) {
    if (turn === shown) fail(error);
  }
}

function fail(error) {
  notify(error.message, true);
  if (!view.root) main.replaceChildren();
}

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
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || (event.key === "Enter" && event.target.matches("button, a, summary"))) return;
  const act = event.key === "?" ? toggleHelp : view.keys?.[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

/** Ask every run for its news, then the view; a failure is said once and asked again. */
async function poll() {
  if (!document.hidden) {
    try {
      const changed = (await Promise.all(runs.map((run) => run.update()))).some(Boolean);
      if (document.getElementById("notice").className === "error") notify("");
      await view.refresh?.(changed);
    } catch (error) {
      notify(error.message, true);
    }
  }
  setTimeout(poll, POLL_MS);
}

try {
  const folders = await ask("api/runs");
  runs = folders.map((folder, number) => new Run(number, folder));
  await Promise.all(runs.map((run) => run.update()));
  window.addEventListener("hashchange", show);
  await show();
  setTimeout(poll, POLL_MS);
} catch (error) {
  fail(error);
}
