// An exported rollout: its conversation and the tokens of its turns, from the answers that the file carries.

import { exported } from "./parts.js";
import { showTokens } from "./tokens.js";
import { showTrajectory } from "./trajectory.js";

let shownView = {};

async function showExported() {
  const [path, search] = location.hash.slice(2).split("?");
  const [name, , session = exported[""].session_id, turn] = path.split("/").map(decodeURIComponent);
  const place = { number: 0, run: {}, rest: [session, turn], search: Object.fromEntries(new URLSearchParams(search)) };
  shownView = await (name === "tokens" ? showTokens(place) : showTrajectory(place));
  document.getElementById("main").replaceChildren(shownView.root);
  shownView.begin?.();
}

window.addEventListener("hashchange", showExported);
document.addEventListener("keydown", (event) => event.target.matches("select") || shownView.keys?.[event.key]?.());
showExported();
