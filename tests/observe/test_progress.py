"""What a person sees of a run: progress while it goes, and the table and advice at its end.

- plain: one aligned line a step, the time left from the pace of the steps, a line for each quarter of a phase, no
  control character. A side that does not wait is a dash. `none` shows nothing; `auto` is plain without a terminal.
- What was dropped or masked, and the MFU where it is known, are shown in both.
- In a terminal it draws a picture, leaves the last one there and gives the cursor back.
- The table lists the longest activity first and leaves small ones out. The advice names the side that was waited
  for, and why; without a step there is none; fewer threads are advised where there is more than one.
"""

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from areal_agent.observe.metrics import Spent, untrained
from areal_agent.observe.progress import LiveDisplay, Progress, StepView, advice, time_table


def spent(engine: dict[str, float], trainer: dict[str, float]) -> Spent:
    return Spent(wall_s=100.0, engine=engine, trainer=trainer)


def test_the_longest_first_and_crumbs_left_out() -> None:
    table = time_table(
        spent({"evaluating": 10.0, "generating": 89.7, "paused_for_push": 0.3}, {"training": 60.0, "pushing": 40.0})
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines[1] == ["90%", "generating", "60%", "training"]
    assert lines[2] == ["10%", "evaluating", "40%", "pushing"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("engine", "trainer", "says"),
    [
        (
            {"generating": 90.0},
            {"waiting_for_rollouts": 60.0},
            "waited 60% of the time for rollouts, while the engine gen",
        ),
        ({"waiting_for_agents": 80.0}, {"waiting_for_rollouts": 60.0}, "rollout.max_concurrent"),
        ({"waiting_for_admission": 70.0}, {"waiting_for_rollouts": 30.0}, "let none run: try a larger max_staleness"),
        ({"waiting_for_gateway": 70.0}, {"waiting_for_rollouts": 30.0}, "rollout.workers"),
        ({"waiting_for_admission": 70.0}, {"training": 90.0}, "the engine waited 70% of the time for the trainer"),
        ({"generating": 70.0}, {"saving": 40.0, "waiting_for_rollouts": 30.0}, "trainer.checkpoint_every"),
        ({"generating": 95.0}, {"training": 95.0}, "neither side waited much"),
    ],
)
def test_the_advice_names_who_was_waited_for(engine: dict[str, float], trainer: dict[str, float], says: str) -> None:
    assert says in advice(spent(engine, trainer))


def test_there_is_none_without_a_step() -> None:
    assert advice(Spent.of([])) == ""


def test_the_advice_suits_the_run_and_the_machine() -> None:
    waiting = spent({"waiting_for_agents": 80.0}, {"waiting_for_rollouts": 60.0})
    assert "more agents at once" in advice(waiting, is_online=True)
    assert "max_concurrent" not in advice(waiting, is_online=True)
    for steps in (waiting, spent({"waiting_for_admission": 70.0}, {"training": 90.0})):
        assert "every core of this machine is busy" in advice(steps, load=1.3)
        assert "every core" not in advice(steps, load=0.7)


@pytest.mark.parametrize(("engine_threads", "is_told"), [(1, False), (2, True)])
def test_fewer_threads_are_advised_where_there_are_some(engine_threads: int, is_told: bool) -> None:
    steps = spent({"waiting_for_admission": 70.0}, {"training": 90.0})
    assert ("fewer engine.threads" in advice(steps, engine_threads=engine_threads)) is is_told


VIEW = StepView(
    step=1,
    reward=0.25,
    success=0.5,
    generated_tokens_per_s=1512.4,
    trained_tokens_per_s=980.0,
    staleness_mean=0.8,
    staleness_max=2,
    engine={"generating": 0.7, "waiting_for_agents": 0.2, "paused_for_push": 0.1},
    trainer={"training": 0.65, "waiting_for_rollouts": 0.35},
)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def plain(stream: io.StringIO, total_steps: int, times_s: list[float]) -> Progress:
    clock = iter(times_s)
    return Progress(total_steps, stream, mode="plain", now=lambda: next(clock))


def test_a_step_is_one_aligned_line_under_a_heading(stream: io.StringIO) -> None:
    progress = plain(stream, 100, [0.0, 5.0])
    progress.step(VIEW)
    progress.step(replace(VIEW, step=100, reward=-10.5, generated_tokens_per_s=123456.0))
    heading, first, last = stream.getvalue().splitlines()
    for name, value in (("step", "1/100"), ("reward", "0.250"), ("success", "0.500"), ("staleness", "0.8 max 2")):
        assert first.index(value) + len(value) == heading.index(name) + len(name)
    assert len(first) == len(last) == len(heading)
    assert "20% agents" in first and "35% rollouts" in first


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_what_a_step_did_not_train_and_its_mfu_are_in_its_line(kind: str, stream: io.StringIO) -> None:
    row = {"rollouts/dropped/stale": 8, "tokens/masked/altered": 1200, "tokens/masked/other_roots": 30}
    view = replace(VIEW, untrained=untrained(row), mfu=0.314)
    if kind == "plain":
        plain(stream, 100, [0.0]).step(view)
    else:
        display = LiveDisplay(100, stream)
        display.step(view, None)
        display.close()
    assert "dropped 8 stale; masked 1,200 tokens altered" in stream.getvalue()
    assert "MFU" in stream.getvalue() and "0.31" in stream.getvalue()


def test_the_time_left_follows_the_pace(stream: io.StringIO) -> None:
    progress = plain(stream, 10, [0.0, 60.0, 120.0])
    for step in (1, 2, 3):
        progress.step(replace(VIEW, step=step))
    assert [line.split()[-1] for line in stream.getvalue().splitlines()[1:]] == ["-", "8:00", "7:00"]


def test_the_time_left_leaves_out_what_came_before_the_steps(stream: io.StringIO) -> None:
    progress = plain(stream, 4, [0.0, 500.0, 510.0])
    progress.phase("evaluating before")
    progress.phase_progress(1.0, "200/200 tasks")
    progress.step(VIEW)
    assert stream.getvalue().splitlines()[-1].split()[-1] == "0:30"


def test_a_phase_is_a_line_for_each_quarter(stream: io.StringIO) -> None:
    progress = Progress(10, stream, mode="plain")
    progress.phase("evaluating before")
    for number in range(201):
        progress.phase_progress(number / 200, f"{number}/200 tasks")
    assert stream.getvalue().splitlines() == [
        "evaluating before ...",
        "evaluating before ...  25%  50/200 tasks",
        "evaluating before ...  50%  100/200 tasks",
        "evaluating before ...  75%  150/200 tasks",
        "evaluating before ... 100%  200/200 tasks",
    ]


def test_a_side_that_does_not_wait_is_a_dash(stream: io.StringIO) -> None:
    plain(stream, 10, [0.0]).step(replace(VIEW, engine={"generating": 1.0}, trainer={"training": 1.0}))
    assert stream.getvalue().splitlines()[1].split()[-3:] == ["-", "-", "-"]


def use_all(progress: Progress) -> None:
    progress.phase("starting")
    progress.phase_progress(0.5, "half")
    progress.step(VIEW)
    progress.note("a [note] stays")
    progress.close()
    progress.close()


def test_auto_is_plain_without_a_terminal_and_has_no_control_character(stream: io.StringIO) -> None:
    use_all(Progress(10, stream))
    assert "a [note] stays\n" in stream.getvalue()
    assert stream.getvalue().replace("\n", "").isprintable()


def test_off_shows_nothing(stream: io.StringIO) -> None:
    use_all(Progress(10, stream, mode="none"))
    assert stream.getvalue() == ""


def shown_in_a_terminal() -> str:
    """What a real terminal receives while `use_all` runs in a process of its own."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen([sys.executable, __file__], stdin=slave, stdout=slave, stderr=slave, env=environment):
        os.close(slave)
        received = b""
        try:
            while chunk := os.read(master, 65536):
                received += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(master)
    return received.decode()


def test_a_terminal_gets_a_picture_and_its_cursor_back() -> None:
    received = shown_in_a_terminal()
    assert received.count("\x1b[?25l") == received.count("\x1b[?25h") > 0  # the cursor, hidden and shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", received)
    last_picture = text[text.rindex("step 1/10") :]
    assert "✓ starting" in text
    assert "a [note] stays" in text
    for part in ("reward", "0.250", "1,512 tokens/s", "generating 70% · waiting for agents 20%", "at most 2"):
        assert part in last_picture


if __name__ == "__main__":
    use_all(Progress(10))
