"""The storm: a run under faults keeps its promises, the same seed tells the same story, and defects are found.

* with all kinds of faults every promise holds (a story; 40 of them are slow)
* a story can be told again, event by event and name by name, and leaves the process's logs as they were
* a broken story is printed with the command that tells it again
* numbers that are too low or too high and unknown kinds are refused
* Ctrl-C and SIGTERM print what was told by then
* a process that dies ends the command, and one that takes too long is killed; neither leaves a folder
* faults are left out of a failing story until it is short
* a promise that the product breaks is found: eleven defects are planted
"""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_agent.errors import ProcessDied
from areal_agent.storm.__main__ import apart, main, report
from areal_agent.storm.faults import Fault, draw_faults, shrink
from areal_agent.storm.story import Told

PLANTED = Path(__file__).with_name("planted.py")


def run(*words: str) -> str:
    """Run Python with these words, in which sets have one order; return what it prints."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_promise_holds() -> None:
    told = run("-m", "areal_agent.storm", "--faults", "2000", "--seed", "1", "--jobs", "2")
    assert told.endswith("s)\n") and "every promise held" in told, told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--faults", "0"], "--faults is 0"),
        (["--faults", "1" + 26 * "0"], "give 10000000 or less"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", "2147483647"], "give 2147283647 or less"),
        (["--kinds", "an engine is kiled"], "did you mean 'an engine is killed'?"),
        (["--kinds", "rain"], "valid: a call of a push fails, "),
    ],
)
def test_what_is_refused(words: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert told in capsys.readouterr().err


def test_the_command_that_tells_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["a worker is killed", "an engine's answer is lost"]
    counts = {"num_lives": 1, "num_steps": 0, "num_answers": 0}
    report(Told(seed=7, faults=[], broken=["it is lost"], lines=["it begins"], struck=Counter(), **counts), kinds)
    *_, line, broken, again = capsys.readouterr().out.splitlines()
    assert (line, broken) == ("it begins", "BROKEN: it is lost")
    assert shlex.split(again)[3:] == ["areal_agent.storm", "--seed", "7", "--faults", "0", "--kinds", *kinds]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_what_was_told(ending: signal.Signals) -> None:
    terminal, other_end = pty.openpty()
    told = subprocess.Popen(
        [sys.executable, "-m", "areal_agent.storm", "--faults", "5000", "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=other_end,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    os.close(other_end)
    progress = b""
    while b"1 of 100 stories" not in progress:
        progress += os.read(terminal, 1024)
    os.killpg(told.pid, ending)
    out, _ = told.communicate()
    os.close(terminal)
    assert told.returncode == 130
    assert re.search(r"\d+  of \d+ faults found something to strike", out)
    assert re.search(r"of 100 stories \(seeds 0 to 99\), interrupted: .*every promise held", out)


def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr("areal_agent.storm.__main__.ENDINGS", ())
    monkeypatch.setattr("areal_agent.storm.__main__.tell", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ProcessDied, match=r"was killed by SIGKILL\nagain: .* --seed 5 --faults 30 --kinds 'a worker"):
        main(["--seed", "5", "--faults", "30", "--kinds", "a worker is killed"])


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ProcessDied, match=r"spin\(8,\) was killed by SIGKILL, as it had not ended within 1 s"):
        apart(spin, 8, limit_s=1.0)
    assert not list(tmp_path.iterdir())


def spin(seed: int) -> None:
    Path(tempfile.mkdtemp()).joinpath(str(seed)).touch()
    while True:
        pass


TELL_TWICE = """
import logging, multiprocessing
from areal_agent.storm.faults import draw_faults
from areal_agent.storm.programs import truth_now
from areal_agent.storm.story import tell

def story(seed):
    told = tell(seed, draw_faults(seed, 15))
    assert not told.broken, told.broken
    return [*told.lines, *sorted(truth_now[0].answers), logging.root.isEnabledFor(logging.WARNING)]

with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    one, other = pool.map(story, [15, 15], chunksize=1)
assert one == other and one[-1]
print(*one, sep="\\n")
"""


def test_a_story_can_be_told_again() -> None:
    told = run("-c", TELL_TWICE)
    assert len(told.splitlines()) > 100
    assert re.search(r"an engine is stopped: engine \d for \d+ s$", told, re.MULTILINE)  # what, and for how long


def test_faults_are_left_out_until_a_story_is_short() -> None:
    faults = draw_faults(seed=3, num_faults=40)
    guilty = {faults[7].draw, faults[31].draw}

    def fails(left: Sequence[Fault]) -> bool:
        return guilty <= {one.draw for one in left}

    short = shrink(faults, fails, max_tries=400)
    assert {one.draw for one in short} == guilty
    assert sum(one.gap_s for one in short) == pytest.approx(
        sum(one.gap_s for one in faults[:32])
    )  # they strike in time


DEFECTS = {  # with the first story, and what it has to tell
    "acknowledged_before_the_commit:4": "reached its agent and is not in the ledger",
    "capacity_returned_twice:4": "counted as running",
    "stale_version_accepted:15": "trains a token of version",
    "twice_in_a_step:1": "trains a record twice",
    "altered_tokens:1": "that are in none of its answers",
    "a_worker_fails:1": "an unexpected AssertionError",
    "a_gateway_fails:1": "an unexpected KeyError",
    "a_run_ends:1": "an unexpected LedgerError",
    "a_loss_unnoticed:5": "the run has not completed",
    "room_not_given_back:1": "before the room of the one before it was given back",
    "a_lease_without_end:5": "s after it was replaced",
}


@pytest.mark.slow
def test_planted_defects_are_found() -> None:
    told = dict(zip(DEFECTS, json.loads(run(str(PLANTED), *DEFECTS)), strict=True))
    assert {defect: lines for defect, lines in told.items() if DEFECTS[defect] not in "\n".join(lines)} == {}
