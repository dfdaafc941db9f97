"""Draw README's picture from a real run: its curve, and beside it one of its trajectories, token by token.

    python docs/make_picture.py RUN_DIR          # writes docs/picture.png

Left: reward by step, and success on held-out tasks before and after. Right: a rewarded trajectory with the most turns,
if there is one with an answer that a push of weights interrupted; its tokens have the colours of their weight versions.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.files import ledger_in, reading
from areal_agent.observe.curve import draw_reward, draw_success
from areal_agent.types import SessionPurpose, Trajectory

OUT = Path(__file__).with_name("picture.png")
SIZE = (11.0, 4.1)  # inches
RIGHT = (0.42, 0.02, 0.57, 0.96)  # the place of the trajectory, in shares of the picture
WIDTH, INDENT = 66, 7  # its characters
FONT_SIZE = SIZE[0] * RIGHT[2] * 72 / WIDTH / 0.602  # a character of DejaVu Sans Mono is 0.602 em wide
INK = "#1f2933"
VERSIONS = ("#bfdbfe", "#bbf7d0", "#fde68a", "#ddd6fe")


def main() -> int:
    parser = Parser(prog="python docs/make_picture.py", description="Draw README's picture from a real run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run that is completed")
    run_dir: Path = parser.parse_args().run_dir
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [row for line in (run_dir / "metrics.jsonl").open() if (row := json.loads(line))["kind"] == "step"]
    tokenizer = Tokenizer.from_file(str(Path(summary["checkpoint"]) / "tokenizer.json"))
    figure = Figure(figsize=SIZE, dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.05, 0.13, 0.33, 0.74))
    draw_reward(axes, *(np.array([row[name] for row in rows]) for name in ("step", "reward/mean")))
    draw_success(summary["success_before"], summary["success_after"], (), axes)
    axes.set_title("Reward", loc="left", fontsize=10)
    axes.set_xlabel("train step")
    axes.spines[["top", "right"]].set_visible(False)
    draw_trajectory(figure.add_axes(RIGHT), choose(run_dir), tokenizer)
    figure.savefig(OUT)
    return 0


def choose(run_dir: Path) -> Trajectory:
    """Return the trajectory to show."""
    with reading(ledger_in(run_dir)) as snapshot:
        groups = questions.rollouts_of(snapshot, questions.group_ids(snapshot, SessionPurpose.TRAIN)[::-1])
        trained = [one for group in groups.values() for one in group if one.fate and one.fate.trained_step]
        found = [questions.trajectory(snapshot, one.session_id) for one in trained if one.rewards.final == 1]
    if not found:
        raise ConfigError(f"{run_dir} has no trajectory that was rewarded and trained; draw another run")
    return max(found, key=lambda one: (len(one.turns), _is_interrupted(one)))


def _is_interrupted(trajectory: Trajectory) -> bool:
    """Return whether new weights arrived within an answer."""
    return any(len(answer.versions) > 1 for turn in trajectory.turns for answer in turn.completions)


def draw_trajectory(axes: Axes, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    colours = dict(zip(sorted(trajectory.sampled_steps()), cycle(VERSIONS), strict=False))
    row = 0
    for row, column, text, version in _pieces(trajectory, tokenizer):
        if version is not None:
            axes.barh(row, len(text), 0.88, column, color=colours[version], edgecolor="white")
        weight = "normal" if column else "bold"
        axes.text(column, row, text, va="center", color=INK, fontsize=FONT_SIZE, family="monospace", weight=weight)
    axes.set(xlim=(0, WIDTH), ylim=(row + 1, -1))
    axes.set_axis_off()


def _pieces(trajectory: Trajectory, tokenizer: Tokenizer) -> Iterator[tuple[int, int, str, int | None]]:
    """Yield texts with their row and column: what the agent sent, and sampled tokens with their weight version."""
    said: list[tuple[str, Sequence[tuple[str, int | None]]]] = []
    for turn in trajectory.turns:
        asked = [message for message in turn.request_delta if message["role"] in ("user", "tool")]
        said += [(message["role"], [(" ".join(str(message["content"]).split()), None)]) for message in asked]
        (answer,) = turn.completions
        tokens = [tokenizer.decode([one], skip_special_tokens=False).replace("\n", "↵") for one in answer.token_ids]
        said.append(("model", list(zip(tokens, answer.version_steps(), strict=True))))
    said.append(("", [(f" sampled by version {step} ", step) for step in sorted(trajectory.sampled_steps())]))
    step = trajectory.fate and trajectory.fate.trained_step
    news = "; new weights came in mid-answer" if _is_interrupted(trajectory) else ""
    said.append(("", [(f"reward {trajectory.rewards.total:g}, trained in step {step}{news}", None)]))
    row = -2
    for label, pieces in said:
        row, column = row + 2, INDENT
        yield row, 0, label, None
        for text, version in pieces:
            if column + len(text) > WIDTH:
                row, column = row + 1, INDENT
            yield row, column, text, version
            column += len(text)


if __name__ == "__main__":
    run_command(main)
