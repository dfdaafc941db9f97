"""The address of the page: 1. a real process prints it, serves the page, and ends with Ctrl-C; 2. a wrong key, host or
origin gets one line, and so does a call that is wrong; 3. the run folder stays as it was.
"""

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agent.images import ImageFolder


def get(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def served(run: Path) -> Iterator[str]:
    """The address that a real process prints; Ctrl-C ends it."""
    command = [sys.executable, "-m", "areal_agent.view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_who_may_ask_and_what(run: Path, served: str) -> None:
    drawing = ImageFolder(run / "images").keep(b"<svg onload='alert(1)'>")
    before = (run / "ledger.sqlite").read_bytes(), sorted(path.name for path in run.iterdir())
    assert get(served)[0] == get(f"{served}api/0/state", Origin=served.rpartition("/")[0].rpartition("/")[0])[0] == 200
    wrong = f"{served[:-2]}?/"
    for address, headers, status, message in (
        (wrong, {}, 403, "the key in it is missing or wrong"),
        (f"{wrong}api/0/state", {}, 403, "the key in it is missing or wrong"),
        (f"{served}api/0/state", {"Host": "evil.example"}, 403, "evil.example"),
        (f"{served}api/0/state", {"Origin": "http://evil.example"}, 403, "evil.example"),
        (f"{served}../../etc/passwd", {}, 404, "Not Found"),
        (f"{served}api/1/state", {}, 404, "there is no run 1"),
        (f"{served}api/0/rollouts?colour=red", {}, 400, "there is no filter 'colour'"),
        (f"{served}api/0/rollouts?step=x", {}, 400, "step is 'x'; give a whole number"),
        (f"{served}api/0/rollout?session=none", {}, 422, "the ledger has no session 'none'"),
        (f"{served}api/0/tokens?session=g0-0&turn=none", {}, 422, "has no turn 'none'"),
        (f"{served}api/0/rollouts?step={10**30}", {}, 400, "give a whole number"),
        (f"{served}api/0/rollouts?least_reward=nan", {}, 400, "give a number"),
        (f"{served}api/0/rollouts?text={'%E2%82%AC' * 2000}", {}, 200, '"rollouts":[]'),
        (f"{served}images/0/{drawing}", {}, 404, "neither PNG, JPEG nor WebP"),
        (f"{served}images/0/{'0' * 64}", {}, 422, "cannot be read"),
        (f"{served}images/0/..%2f..%2fledger.sqlite", {}, 422, "is no SHA-256 of an image"),
        (f"{wrong}images/0/{drawing}", {}, 403, "the key in it is missing or wrong"),
        (served[:-1], {}, 200, "<!doctype html>"),
        (f"{served}none.js", {}, 404, "there is no 'none.js'"),
    ):
        assert get(address, **headers)[0] == status, address
        assert message in get(address, **headers)[1]
        assert status == 200 or "\n" not in get(address, **headers)[1]
    assert ((run / "ledger.sqlite").read_bytes(), sorted(path.name for path in run.iterdir())) == before
