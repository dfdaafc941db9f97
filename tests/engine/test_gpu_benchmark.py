"""The GPU benchmark of the engine runs on a CPU, with the same code and a small model. A server of a benchmark ends
with it, also one that it has stopped."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent

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


@pytest.mark.slow
def test_the_benchmark_for_gpus_fills_its_tables_on_a_cpu():
    command = [sys.executable, "benchmarks/engine/gpu.py", "--shapes", "tiny", "--device", "cpu"]
    command += ["--rounds", "1", "--pushes", "2", "--requests", "2", "--long", "160"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    for tokens in ("128 + 128", "160 + 128"):
        assert all(f"| 2 | {tokens} | {side} |" in done.stdout for side in ("floor", "ours", "generate")), done.stdout
    assert "| shared memory |" in done.stdout
