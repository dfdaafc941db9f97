"""`python -m areal_agent.gateway` with a real engine.

1. It prints where it serves and where its key is, in a file for its owner alone; SIGTERM drains it. 2. Sessions that a
killed one left open are orphans for the next, which uses the same key. 3. Another address needs a chosen key. 4. A key
comes from one place and is a single word. 5. Every start-up error is one line with the remedy, and leaves no key
behind. 6. A trainer whose gateway has no key yet is told to start the gateway first.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.errors import ConfigError
from areal_agent.gateway.__main__ import main
from areal_agent.gateway.auth import KEY_VARIABLE, AdminKey, find_admin_key
from areal_agent.ledger import questions
from areal_agent.ledger.files import FileLock, reading
from areal_agent.ledger.verify import verify
from areal_agent.types import WeightVersion

from .live import on_a_thread

LIMIT_S = 120.0


@contextmanager
def running(log: Path, *args: str) -> Generator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", *args], stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """Wait for what a process prints and return it."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := re.search(pattern, log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]


@pytest.fixture(scope="module")
def engine_url(small_model: Path) -> Generator[str]:
    runner = ModelRunner(str(small_model), device="cpu", num_slots=8, max_context_tokens=512)
    with on_a_thread(lambda: EngineServer.start(runner, version=WeightVersion(step=0))) as url:
        yield url


def post(url: str, key: str, **body: Any) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    with urlopen(request) as answer:
        return json.loads(answer.read())


def ask(session: Any) -> Any:
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    return post(
        f"{session['base_url']}/chat/completions", session["api_key"], model="default", messages=messages, max_tokens=4
    )


def test_it_serves_and_ends_with_grace_and_the_next_one_goes_on(
    engine_url: str, small_model: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "ledger", tmp_path / "gateway.log"
    args = ("areal_agent.gateway", "--engine", engine_url, "--tokenizer", str(small_model), "--port", "0")
    args += ("--ledger", str(folder), "--model", "small")
    with running(log, *args) as gateway:
        url = said(gateway, log, r"gateway ready at (\S+)")
        key_file = folder / "admin_key"
        key = key_file.read_text().strip()
        assert "tool format hermes\n" in log.read_text()
        assert f"in {key_file} (mode 0600)" in log.read_text() and key not in log.read_text()
        assert f"engine.url={engine_url} rollout.gateway_admin_key_file={key_file}\n" in log.read_text()
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        session = post(f"{url}/rl/start_session", key, task_id="t")
        assert session["anthropic_base_url"] + "/v1" == session["base_url"]
        assert ask(session)["usage"]["completion_tokens"] > 0
        gateway.send_signal(signal.SIGKILL)
    with running(log, *args) as gateway:
        url = said(gateway, log, r"gateway ready at (\S+)")
        assert "0 rollouts wait to be trained, 1 were cut off and are orphans" in log.read_text()
        ask(post(f"{url}/rl/start_session", key, task_id="t"))
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(LIMIT_S) == 0
    assert "1 open sessions ended as cancelled" in log.read_text()
    assert verify(folder / "ledger.sqlite").violations == ()
    with reading(folder / "ledger.sqlite") as snapshot:
        assert questions.note(snapshot, questions.STATUS_NOTE) == "interrupted"


def key_of(tmp_path: Path, **values: Any) -> AdminKey:
    defaults: dict[str, Any] = {"given": None, "file": None, "environment": {}, "host": "127.0.0.1"}
    return AdminKey.obtain(**(defaults | values), folder=tmp_path)


def test_another_address_needs_a_chosen_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines connect, and there is no admin key"):
        key_of(tmp_path, host="0.0.0.0")
    assert key_of(tmp_path, host="0.0.0.0", environment={KEY_VARIABLE: "chosen"}).key == "chosen"


def test_a_key_comes_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" from-file\n")
    environment = {KEY_VARIABLE: "from-environment"}
    assert key_of(tmp_path, given="given", environment=environment).key == "given"
    assert key_of(tmp_path, file=file, environment=environment).key == "from-file"
    assert key_of(tmp_path, environment=environment).key == "from-environment"
    made = key_of(tmp_path)
    made.keep()
    assert key_of(tmp_path).key == made.key
    assert "from-file" not in repr(key_of(tmp_path, file=file))
    with pytest.raises(ConfigError, match="both give a key"):
        key_of(tmp_path, given="given", file=file)


def test_a_key_file_that_is_not_there_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*admin_key; start the gateway first, from this folder"):
        find_admin_key(tmp_path / "admin_key", {})


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "a\nb"])
def test_a_key_is_a_word(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="holds no usable key"):
        key_of(tmp_path, given=key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--engine": "localhost:1"}, "--engine is 'localhost:1'; give a URL"),
        ({"--engine": "http://127.0.0.1:9"}, r"--engine http://127\.0\.0\.1:9: no answer .* is the engine running\?"),
        ({"--tokenizer": "nowhere"}, r"nowhere has no tokenizer\.json"),
        ({"--port": "70000"}, "--port is 70000"),
        ({"--image-source": "example.org"}, "--image-source has no effect without --images"),
        ({"--image-source": "https://example.org"}, "--image-source is 'https://example.org'; give a host"),
        ({"--max-staleness": "2"}, "--max-staleness and --batch-answers are one bound"),
        ({"--session-timeout": "-1"}, "--session-timeout is -1"),
        ({"--drain-timeout": "nan"}, "--drain-timeout is nan"),
        ({"--admin-key-file": "nowhere"}, "the admin key file nowhere cannot be read: No such file"),
        ({"--ledger": "/dev/null/x"}, "--ledger: the folder /dev/null/x cannot be made"),
    ],
)
def test_whatever_stands_in_the_way_is_one_line(
    small_model: Path, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    values = {"--engine": "http://127.0.0.1:9", "--tokenizer": str(small_model), "--port": "0"}
    values |= {"--ledger": str(tmp_path / "ledger")} | options
    with pytest.raises(ConfigError, match=message) as raised:
        main([word for option in values.items() for word in option])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ledger" / "admin_key").exists()  # nobody takes it for that of a gateway which serves


def test_a_locked_ledger_and_a_taken_port_are_one_line(engine_url: str, small_model: Path, tmp_path: Path) -> None:
    args = ["--engine", engine_url, "--tokenizer", str(small_model), "--ledger", str(tmp_path)]
    lock = FileLock.take(tmp_path / "ledger.sqlite", is_shard=False)
    with pytest.raises(ConfigError, match="--ledger: another process is writing"):
        main([*args, "--port", "0"])
    lock.release()
    with pytest.raises(ConfigError, match=r"port \d+ on 127\.0\.0\.1 is in use; choose another port"):
        main([*args, "--port", engine_url.rpartition(":")[2]])
