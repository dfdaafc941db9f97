"""Sandboxes without asyncio.

1. Every call of a sandbox does as its asynchronous namesake; 2. calls come from several threads at once; 3. nothing is
left, threads included; 4. an error is raised where the call was; 5. calls of threads that outlive the pool end.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes import SandboxSpec, Status, sync


def test_calls_of_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from the host")
    with sync.open_pool(backend="subprocess", wall_s=20.0) as pool, pool.acquire(SandboxSpec(env={"A": "1"})) as box:
        assert box.exec(["sh", "-c", "cat; echo $A"], stdin=b"in ").stdout == b"in 1\n"
        assert box.exec_python("exit(3)").exit_code == 3
        box.upload(tmp_path, "there")
        assert (box.read("there/file"), len(box.download("there")) > 512) == (b"from the host", True)
        shell = box.shell()
        shell.run("x=1")
        assert shell.run("echo $x").stdout == b"1\n"
        with box.python() as python:
            python.run("x = 1")
            assert python.run("print(x)").stdout == b"1\n"
        process = box.spawn(["cat"])
        process.write(b"echo")
        assert next(process.stdout) == b"echo"
        process.close_stdin()
        assert (list(process.stdout), process.wait().status) == ([], Status.OK)
        assert box.health()


def test_several_threads_and_nothing_left() -> None:
    before = set(threading.enumerate())
    with sync.open_pool(backend="subprocess", wall_s=20.0) as pool, ThreadPoolExecutor(4) as threads:

        def run(number: int) -> bytes:
            with pool.acquire() as box:
                return box.exec_python(f"print({number})").stdout

        assert list(threads.map(run, range(8))) == [b"%d\n" % number for number in range(8)]
    for one in set(threading.enumerate()) - before:  # asyncio's, which saw a box end, may take a moment more
        one.join(5.0)
    assert not set(threading.enumerate()) - before


def test_calls_of_other_threads_end_with_the_pool() -> None:
    told: list[str] = []

    def call_for_ever(pool: sync.Blocking) -> None:
        try:
            while True:
                with pool.acquire() as box:
                    box.exec(["sleep", "0.05"])
        except SandboxError as error:
            told.append(str(error))

    with sync.open_pool(backend="subprocess", wall_s=20.0) as pool:
        threads = [threading.Thread(target=call_for_ever, args=(pool,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(told) == 4 and all("closed" in text for text in told), told


def test_error_is_raised_where_the_call_was() -> None:
    with sync.open_pool(backend="subprocess") as pool:
        with pool.acquire() as box, pytest.raises(FileNotFoundError):
            box.read("nothing")
        with pytest.raises(SandboxError, match="closed"):
            box.exec(["true"])
