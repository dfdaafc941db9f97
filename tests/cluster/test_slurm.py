"""examples/slurm/areal.sbatch on a real Slurm, whose three nodes are daemons of this machine. It needs root.

- A job of three nodes trains the quickstart, with a Ray on each node. The job is completed, the ledger
  holds, and no process of the job is left.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from areal_agent.ledger.verify import verify
from tests.commands import ROOT

pytestmark = pytest.mark.full

NODES = ("n1", "n2", "n3")
LIMIT_S = 1500.0

SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
TaskProlog={folder}/prolog
MpiDefault=none
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm() -> Generator[dict[str, str]]:
    """Yield the environment of the commands of a Slurm of three nodes."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("it needs root, slurm-wlm and munge")
    folder, ports = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), free_ports(1 + len(NODES))
    folder.chmod(0o755)  # munge has a user of its own
    for name in ("state", "munge", *NODES):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    shutil.chown(folder / "munge", "munge", "munge")
    shutil.chown(key, "munge", "munge")
    host = socket.gethostname().split(".")[0]
    settings = SETTINGS.format(host=host, folder=folder, ports=ports)
    for name, port in zip(NODES, ports[1:], strict=True):
        settings += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
    (folder / "slurm.conf").write_text(settings)
    prolog = folder / "prolog"  # Rays that start at once in one folder take each other's names
    prolog.write_text(f"#!/bin/sh\necho export RAY_TMPDIR={folder}/$SLURMD_NODENAME\n")
    prolog.chmod(0o755)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    environment["RAY_raylet_start_wait_time_s"] = "300"  # a machine that runs other tests is slow
    own = [f"--{name}={folder}/munge/{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file", "seed-file")]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        log = stack.enter_context((folder / "log").open("w"))

        def start(*command: str, user: str | None = None) -> None:
            daemon = subprocess.Popen(command, env=environment, user=user, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)

        start("munged", "--foreground", f"--log-file={folder}/munge/log", *own, user="munge")
        wait_until((folder / "munge" / "socket").exists)
        start("slurmctld", "-D", "-c")
        for name in NODES:
            start("slurmd", "-D", "-N", name)
        wait_until(lambda: said(["sinfo", "-h", "-t", "idle", "-o", "%D"], environment) == str(len(NODES)))
        yield environment
        said(["scancel", "--user=root"], environment)
        wait_until(lambda: not said(["squeue", "-h"], environment))


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(number)]


def said(command: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again and again; fail after a limit that only a fault reaches."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def of_job(number: str) -> list[str]:
    """Return the command lines of the processes that were started in a job."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f"SLURM_JOB_ID={number}\0".encode() in process.joinpath("environ").read_bytes():
                found.append(process.joinpath("cmdline").read_text().replace("\0", " "))
    return found


def test_a_job_trains_on_three_nodes_and_leaves_nothing(slurm: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    script, config = ROOT / "examples" / "slurm" / "areal.sbatch", ROOT / "configs" / "quickstart.yaml"
    shorter = ["steps=3", "eval.num_tasks=0", "rollout.workers=3", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        ["sbatch", "--parsable", "--wait", "--nodes=3", script, "--config", config, *shorter],
        cwd=tmp_path,  # where its output goes
        env=slurm | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    job = done.stdout.strip()
    assert done.returncode == 0, (tmp_path / f"slurm-{job}.out").read_text() if job else done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
    for number in range(3):
        assert "Ray runtime started" in (tmp_path / f"ray-{job}-{number}.log").read_text()
    report = verify(tmp_path / "run" / "ledger.sqlite")
    assert report.is_ok, report
    wait_until(lambda: not of_job(job))
