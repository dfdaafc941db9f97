"""The benchmark for GPUs runs from start to end on a CPU, with the same code and small models. A part that fails or
hangs costs itself alone: what it started ends with it, and its tracebacks are kept. So does the server of a benchmark
end with it, also one that it has stopped. The real model is made of both halves that travel, and its questions are its
recipe's."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.__main__ import Part, parts_of, run_part
from benchmarks.gpu.model import main as put_together
from benchmarks.gpu.sums import load
from benchmarks.trainer.gpu import SIDES

ROOT = Path(__file__).parent.parent

BENCHMARK = """
import sys, time
from pathlib import Path
import psutil
sys.path.insert(0, "benchmarks/engine")
import servers
started = [servers._start(["sleep", "600"], Path(log), 0, "/", servers._native_body) for log in sys.argv[1:]]
for server in started:
    while psutil.Process(server.process.pid).name() != "sleep":
        time.sleep(0.01)
started[0].freeze()
print(*(server.process.pid for server in started), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_the_benchmark_that_started_them(tmp_path, end):
    command = [sys.executable, "-c", BENCHMARK, *(str(tmp_path / name) for name in ("frozen", "serving"))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        started = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        benchmark.send_signal(end)
    for server in started:
        server.wait(timeout=60)  # or TimeoutExpired


HANGING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "def wait(): input()\\nwait()"], start_new_session=True,
                         stdin=subprocess.PIPE, stderr=open("CHILD.log", "w"))
print("| child |\\n|---|\\n|", child.pid, "|", flush=True)
child.wait()
"""


def test_a_part_that_hangs_is_ended_with_all_that_it_started_and_says_where_it_was(tmp_path):
    code = HANGING.replace("CHILD", str(tmp_path / "hangs" / "child"))
    part = Part(name="hangs", command=[sys.executable, "-c", code], limit_s=3)
    result = run_part(part, tmp_path / "hangs", part.limit_s, {})
    assert result.state == "timed out"
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(result.rows[0]["child"])).wait(timeout=60)  # or TimeoutExpired
    assert any("in wait" in one and "most recent call first" in one for one in result.tracebacks)  # the child's


def test_a_part_that_fails_keeps_its_traceback(tmp_path):
    part = Part(name="fails", command=[sys.executable, "-c", "[][1]"], limit_s=60)
    result = run_part(part, tmp_path / "fails", part.limit_s, {})
    assert (result.state, result.tracebacks[0].splitlines()[-1]) == ("failed", "IndexError: list index out of range")


@pytest.mark.slow
def test_all_parts_pass_on_a_cpu(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["benchmarks/gpu/run", str(tmp_path), "--device", "cpu", "--shapes", "tiny", "--seconds", "1800"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {part["name"]: part for part in json.loads((tmp_path / "results.json").read_text())["parts"]}
    rates = [row for row in parts["engine-tiny"]["rows"] if "tokens each" in row]
    assert [row["side"] for row in rates] == ["floor", "ours"]
    assert 0 < float(rates[1]["ms a step"]) <= float(rates[1]["longest"])
    assert "stall" in parts["engine-tiny"]["rows"][-1]
    assert [row["side"] for row in parts["trainer"]["rows"]] == list(SIDES)
    for run in ("real-8x8", "real-64x8", "quickstart"):
        found = {row["metric"]: row for row in parts[run]["rows"] if "metric" in row}
        assert float(found["trainer/logp_diff_mean"]["first step"]) < 1e-5
        assert float(found["seconds/wall"]["most"]) > 0
        assert float(parts[run]["rows"][-1]["predicted"]) > 0
    over_time = [row for row in parts["real-8x8"]["rows"] if "s since the command" in row]
    assert [row["step"] for row in over_time] == ["the first answer", "0", "2"]
    for run in ("trl-8x8", "trl-64x8"):
        (row,) = (row for row in parts[run]["rows"] if row.get("side") == "TRL")
        assert "not installed" in row.values() or float(row["median of the others"]) > 0


def test_each_call_has_its_parts_and_both_prepare_the_machine():
    parts = parts_of("python of the wheels", "cuda", is_tiny=False, model=Path("model"))
    names = {call: [part.name for part in parts if part.call in (0, call)] for call in (1, 2)}
    assert names == {
        1: ["setup", "engine-135M", "trainer", "tests", "engine-0.6B"],
        2: ["setup", "model", "real-8x8", "trl-8x8", "real-64x8", "trl-64x8", "quickstart"],
    }


def test_a_half_of_the_model_that_is_not_there_is_named(tmp_path, capsys):
    (tmp_path / "first").write_bytes(b"half")
    assert put_together([str(tmp_path / name) for name in ("model", "first", "second")]) == 1
    assert capsys.readouterr().out.startswith(f"not here: {tmp_path / 'second'}; benchmarks/gpu/wheels makes both")


def test_questions_of_the_real_model_are_the_recipes_and_the_held_out_ones_are_never_trained():
    trained, held_out = ({one["messages"][1]["content"] for one in load(split, 0)} for split in ("train", "test"))
    assert not trained & held_out and "Calculate 8 + 10.\n\nGive only the result." in trained
    assert (len(trained), len(held_out)) == (95, 26)  # docs/real_model.md
