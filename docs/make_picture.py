"""Draw README's picture from a real run: its curve, and beside it one of its trajectories, token by token.

    python docs/make_picture.py RUN_DIR [--session ID]          # writes docs/picture.png

Left: reward by step, and success on held-out tasks before and after. Right: a conversation whose sampled tokens have
the colour of the weight version that sampled them. By default it is a rewarded one with the most turns, if there is one
with an answer that a push of weights interrupted.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tokenizers import Tokenizer

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.files import LedgerFiles
from areal_agent.observe.curve import running_mean
from areal_agent.types import SessionPurpose, Trajectory

OUT = Path(__file__).with_name("picture.png")
WIDTH = 66  # characters of the right side
INDENT = 7
INK, SOFT, CURVE, SUCCESS = "#1f2933", "#64748b", "#2a6f97", "#2b9348"
VERSIONS = ("#bfdbfe", "#bbf7d0", "#fde68a", "#ddd6fe")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text in one colour: a sampled token of a version, or, without one, text that nobody sampled."""

    text: str
    version: int | None = None


def main() -> int:
    parser = Parser(prog="python docs/make_picture.py", description="Draw README's picture from a real run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run that is completed")
    parser.add_argument("--session", metavar="ID", help="the trajectory to show")
    args = parser.parse_args()
    summary = json.loads((args.run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (args.run_dir / "metrics.jsonl").read_text().splitlines()]
    trajectory = choose(args.run_dir / "ledger.sqlite", args.session)
    tokenizer = Tokenizer.from_file(str(Path(summary["checkpoint"]) / "tokenizer.json"))
    figure = Figure(figsize=(11.0, 4.1), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    draw_curve(figure.add_axes((0.05, 0.13, 0.33, 0.74)), [row for row in rows if row["kind"] == "step"], summary)
    draw_trajectory(figure.add_axes((0.42, 0.02, 0.57, 0.96)), trajectory, tokenizer)
    figure.savefig(OUT)
    print(f"{OUT}: session {trajectory.session_id}")
    return 0


def choose(ledger: Path, session_id: str | None) -> Trajectory:
    """Return the trajectory to show."""
    with closing(LedgerFiles(ledger)) as files, files.snapshot() as snapshot:
        ids = [session_id] if session_id else list(_trained(snapshot))
        found = [one for one in (_trajectory(snapshot, name) for name in ids) if one is not None]
    if not found:
        raise ConfigError(f"{ledger} has no such trajectory ({session_id or 'trained and rewarded'})")
    return max(found, key=lambda one: (len(one.turns), _is_interrupted(one)))


def _is_interrupted(trajectory: Trajectory) -> bool:
    """Return whether new weights arrived within an answer."""
    return any(len(answer.versions) > 1 for turn in trajectory.turns for answer in turn.completions)


def _trained(snapshot: Any) -> Iterator[str]:
    query = (
        "SELECT s.id FROM sessions s JOIN endings e ON e.session = s.number WHERE s.purpose = ? AND e.final_reward = 1"
    )
    for connection in snapshot:
        yield from (name for (name,) in connection.execute(query, (SessionPurpose.TRAIN,)))


def _trajectory(snapshot: Any, session_id: str) -> Trajectory | None:
    found = (questions.trajectory_in(connection, session_id) for connection in snapshot)
    return next((one for one in found if one is not None and one.fate and one.fate.trained_step), None)


def draw_curve(axes: Axes, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    steps, rewards = ([row[name] for row in rows] for name in ("step", "reward/mean"))
    axes.plot(steps, rewards, "o", color=CURVE, alpha=0.35, markersize=4, markeredgewidth=0)
    axes.plot(steps, running_mean(np.array(rewards), 5), color=CURVE, linewidth=2.2)
    for level, name, colour in (
        (summary["success_before"], "before", SOFT),
        (summary["success_after"], "after", SUCCESS),
    ):
        axes.axhline(level, color=colour, linestyle=(0, (6, 4)), linewidth=1.2)
        text = f"{name}: {level:.0%} of {summary['num_eval_tasks']} held-out tasks"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(steps[-1], level - 0.05, text, ha="right", va="top", color=colour, fontsize=8.5, bbox=box)
    axes.set_ylim(0.0, 1.03)
    axes.set_xlabel("train step", color=SOFT)
    axes.set_title("mean reward of a train step's rollouts", loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=SOFT, labelsize=8)


def draw_trajectory(axes: Axes, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    lines = list(_lines(trajectory, tokenizer))
    steps = sorted(trajectory.sampled_steps())
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(len(lines) + 3.4, -0.8)
    axes.set_axis_off()
    width_pt = axes.get_position().width * axes.figure.get_figwidth() * 72  # pyright: ignore[reportAttributeAccessIssue]
    size = width_pt / WIDTH / 0.602  # a character of DejaVu Sans Mono is 0.602 em wide
    for row, (label, pieces) in enumerate(lines):
        axes.text(0, row + 0.5, label, va="center", fontsize=size, fontweight="bold", family="monospace", color=INK)
        column = INDENT
        for piece in pieces:
            if piece.version is not None:
                colour = VERSIONS[steps.index(piece.version) % len(VERSIONS)]
                axes.add_patch(
                    Rectangle((column, row + 0.06), len(piece.text), 0.88, facecolor=colour, edgecolor="white")
                )
            axes.text(column, row + 0.5, piece.text, va="center", fontsize=size, family="monospace", color=INK)
            column += len(piece.text)
    row = len(lines) + 1.1
    column = INDENT
    for number, step in enumerate(steps):
        name = f" sampled by version {step} "
        axes.add_patch(Rectangle((column, row), len(name), 0.9, facecolor=VERSIONS[number % len(VERSIONS)]))
        axes.text(column, row + 0.46, name, va="center", fontsize=size, family="monospace", color=INK)
        column += len(name) + 1
    step = trajectory.fate and trajectory.fate.trained_step
    end = f"reward {trajectory.rewards.total:g}, trained in step {step}"
    end += "; new weights arrived in mid-answer" if _is_interrupted(trajectory) else ""
    axes.text(0, row + 1.7, end, va="center", fontsize=size, family="monospace", color=INK)


def _lines(trajectory: Trajectory, tokenizer: Tokenizer) -> Iterator[tuple[str, list[Piece]]]:
    """Yield each line with its label: what the agent sent, and what was sampled."""
    for turn in trajectory.turns:
        for message in turn.request_delta:
            if message["role"] in ("user", "tool"):
                yield from _wrapped(message["role"], [Piece(word) for word in str(message["content"]).split("\n")])
        answer = turn.completions[0]
        pieces = [
            Piece(tokenizer.decode([token], skip_special_tokens=False).replace("\n", "↵"), version)
            for token, version in zip(answer.token_ids, answer.version_steps(), strict=True)
        ]
        yield from _wrapped("model", pieces)


def _wrapped(label: str, pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    line: list[Piece] = []
    for piece in pieces:
        if INDENT + sum(len(one.text) for one in line) + len(piece.text) > WIDTH:
            yield label, line
            label, line = "", []
        line.append(piece)
    yield label, line
    yield "", []


if __name__ == "__main__":
    run_command(main)
