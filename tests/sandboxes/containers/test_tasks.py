"""Task folders, judged in real containers.

1. the solution of each of our own folders earns 1 and no work 0, also SWE-bench's way, where what passed must go on to
pass; 2. cheats in the agent's sandbox earn 0; what it removed is gone where it is judged; 3. a task that asks for the
agent's own sandbox can be cheated, and is marked; 4. limits, users and variables are the task's; 5. an image's
entry point runs, and the sandbox waits until it is ready.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from envs.terminal.tasks import FOLDERS
from sandboxes import Pool, Sandbox, SandboxSpec, Status, open_pool
from sandboxes.containers.engine import Engine
from sandboxes.tasks.harbor import HarborTask, TaskVerdict, judge_solution, main
from sandboxes.tasks.watch import Trust

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(engine: Engine) -> AsyncIterator[Pool]:
    async with open_pool(backend="docker", wall_s=60.0) as pool:
        yield pool


async def sh(box: Sandbox, command: str) -> str:
    result = await box.exec(["sh", "-c", command])
    assert result.is_ok, result
    return result.stdout.decode().strip()


async def verdict_on(task: HarborTask, pool: Pool, command: str) -> TaskVerdict:
    await task.prepare()
    async with task.open(pool) as box:
        await sh(box, command)
        return await task.verify(box, pool)


def copy_of(name: str, folder: Path, *changes: tuple[str, str, str]) -> HarborTask:
    """A task of ours with changes to its files: path, old text (empty: at the end), new text."""
    shutil.copytree(FOLDERS / name, folder, dirs_exist_ok=True)
    for path, old, new in changes:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new) if old else text + new)
    return HarborTask.load(folder)


@pytest.mark.parametrize("name", ["write_number", "sort_names", "repair_sum"])
async def test_solution_and_no_work(pool: Pool, name: str) -> None:
    task = HarborTask.load(FOLDERS / name)
    verdicts = [await judge_solution(task, pool, is_empty=is_empty) for is_empty in (False, True)]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]


async def test_command_line(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, [str(FOLDERS / "sort_names"), "--solution"]) == 0
    assert await asyncio.to_thread(main, [str(FOLDERS)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "1\n"
    assert "is not a task: it lacks task.toml" in shown.err


async def test_repair_that_breaks_what_passed(pool: Pool) -> None:
    task = HarborTask.load(FOLDERS / "repair_sum")
    assert (await verdict_on(task, pool, "sed -i 's/a - b/a + b/; s/2 . a/a/' sums.py")).reward == 0.0


CHEATS = {
    "forged reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod -R 0555 /logs/verifier",
    "tests of its own": "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/*",
    "tools of its own": r"""cd /usr/local/bin; chmod +x $(echo 'case $1 in /app/*) echo 37;; *) head -c 99 "$1"; esac' |
        tee cat > /dev/null; echo cat)""",
    "reward as an artifact": "rmdir /logs/artifacts; ln -s /logs/verifier /logs/artifacts; echo 1 > /logs/reward.txt",
    "tests as the work": "cd /; rm -rf /app; mkdir /tests; ln -s /tests /app",
    "late writer": "(sleep 1; echo 37 > /app/number.txt) > /dev/null 2>&1 &",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheat_earns_nothing(pool: Pool, cheat: str) -> None:
    verdict = await verdict_on(HarborTask.load(FOLDERS / "write_number"), pool, CHEATS[cheat])
    assert verdict.reward == 0.0, verdict


async def test_our_commands_are_not_found_where_the_agent_worked(tmp_path: Path, pool: Pool) -> None:
    test = "PATH=/usr/bin:/bin\n[ -e number.txt ]; echo $((! $?)) > /logs/verifier/reward.txt\n"
    task = copy_of("write_number", tmp_path, ("environment/Dockerfile", "", "ENV PATH=/app/bin:$PATH\n"))
    (tmp_path / "tests/test.sh").write_text(f"#!/bin/sh\n{test}")
    planted = "mkdir bin; cd bin; for name in cat sh tail mkdir rm; do printf '#!/bin/bash\necho 1\n' > $name; done"
    verdict = await verdict_on(task, pool, f"{planted}; chmod +x *")
    assert verdict.reward == 0.0, verdict


async def test_what_was_removed_is_gone_and_links_and_owners_stay(tmp_path: Path, pool: Pool) -> None:
    test = "cd /app && [ ! -e names.txt ] && [ $(readlink l) = m ] && [ $(stat -c %u m) = 7 ]"
    test += " && echo 1 > /logs/verifier/reward.txt"
    task = copy_of("sort_names", tmp_path, ("tests/test.sh", "", f"{test}\n"), ("tests/test.sh", "reward.json", "x"))
    assert (await verdict_on(task, pool, "rm names.txt; touch m; chown 7 m; ln -s m l")).reward == 1.0


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (":", "wrote no reward"),
        ("echo nan > reward.txt", "holds 'nan"),
        ("echo 0 > reward.txt; echo 1 > reward.json", "disagree"),
        ("mkfifo reward.txt", "neither a file nor a folder"),
        ("mkdir reward.txt", "is a folder"),
        ("sleep 100", "did not end within 2 s"),
    ],
)
async def test_no_valid_reward_is_0_with_the_reason(tmp_path: Path, pool: Pool, written: str, told: str) -> None:
    task = copy_of("write_number", tmp_path, ("task.toml", "timeout_sec = 30.0", "timeout_sec = 2.0"))
    (tmp_path / "tests/test.sh").write_text(f"#!/bin/sh\ncd /logs/verifier\necho hi\n{written}\n")
    verdict = await verdict_on(task, pool, "true")
    assert verdict.reward == 0.0
    assert told in verdict.detail and verdict.detail.endswith("hi")


async def test_shared_task_is_marked(tmp_path: Path, pool: Pool) -> None:
    shared = ("task.toml", "[verifier]", "[verifier]\nenvironment_mode = 'shared'")
    task = copy_of("write_number", tmp_path, shared)
    honest = await verdict_on(task, pool, "true")
    cheat = await verdict_on(task, pool, CHEATS["tools of its own"])
    assert (honest.reward, cheat.reward, cheat.trust) == (0.0, 1.0, Trust.OWN_SANDBOX)


async def test_limits_users_and_variables(tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.containers.provider.LAYER_PAUSE_S", 0.1)
    settings = "memory_mb = 64\nenv = {GREETING = '${WHO:-you}'}"
    task = copy_of("write_number", tmp_path, ("task.toml", "memory_mb = 256", settings))
    await task.prepare()
    async with task.open(pool) as box:
        assert await sh(box, "id -u; echo $GREETING $HOME; pwd") == "0\nyou /root\n/app"
        assert await sh(box, "grep CapEff /proc/self/status") == "CapEff:\t000000000000000b"
        attack = (
            "kill -9 -1; for pid in 1 2 3 4 5 6 7 8 9; do kill -INT $pid; prlimit --pid $pid --nofile=3; done; true"
        )
        assert (await box.exec(["sh", "-c", attack])).is_ok
        fill = ["sh", "-c", "head -c 20000000 /dev/zero >> /var/tmp/$(date +%N)"]
        while (await box.exec(fill)).status is not Status.DISK:  # 64 MB may be written; it is looked at times
            pass
        assert "used up all disk" in (await task.verify(box, pool)).detail
    async with task.open(pool) as box:
        assert (await box.exec_python("x = bytearray(2**28)")).status is Status.MEMORY


async def test_user_who_is_not_root(tmp_path: Path, pool: Pool) -> None:
    task = copy_of(
        "write_number",
        tmp_path,
        ("task.toml", "[agent]", "[agent]\nuser = 1000"),
        ("task.toml", "[verifier]", "[verifier]\nuser = 1000"),
        ("environment/Dockerfile", "", "RUN chown 1000 .\n"),
    )
    assert (await verdict_on(task, pool, "id -u | grep 1000; ! touch /etc/x; echo 37 > number.txt")).reward == 1.0


async def test_service_lives_and_is_waited_for(tmp_path: Path, pool: Pool) -> None:
    check = "[environment.healthcheck]\ncommand = 'grep -q up /state'\n"
    start = """ENTRYPOINT ["sh", "-c", "sleep 0.3; echo up > /state; yes; exec \\"$@\\"", "sh"]\n"""
    task = copy_of("write_number", tmp_path, ("task.toml", "", check), ("environment/Dockerfile", "", start))
    await task.prepare()
    async with task.open(pool) as box:
        for _ in range(2):  # it outlives other programs
            assert await sh(box, "cat /proc/[0-9]*/comm | grep yes") == "yes"
    with pytest.raises(SandboxError, match="not ready within 5 s by 'echo no; false': no"):
        async with pool.acquire(SandboxSpec(ready="echo no; false", ready_wall_s=5.0)):
            pass
