"""Containers under gVisor, where the engine has it as the runtime `runsc`.

1. programs run one after the other, each with its own end; 2. one that takes all memory is never OK.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import Sandbox, SandboxSpec, Status, open_pool
from sandboxes.containers.engine import Engine

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture(loop_scope="module")
async def box(engine: Engine) -> AsyncIterator[Sandbox]:
    async with open_pool(backend="docker", wall_s=30.0) as pool, AsyncExitStack() as stack:
        try:
            box = await stack.enter_async_context(pool.acquire(SandboxSpec(runtime="runsc")))
        except SandboxError as error:
            pytest.skip(str(error))
        yield box


async def test_programs_one_after_the_other(box: Sandbox) -> None:
    ends = [await box.exec_python(f"print({code}); raise SystemExit({code})") for code in (0, 3, 0)]
    assert [(end.status, end.exit_code, end.stdout) for end in ends] == [
        (Status.OK, 0, b"0\n"),
        (Status.NONZERO, 3, b"3\n"),
        (Status.OK, 0, b"0\n"),
    ]


async def test_a_memory_bomb_is_never_ok(box: Sandbox) -> None:
    bomb = "taken = []\nwhile True: taken.append(bytearray(10**7))"
    with suppress(SandboxError):  # the runtime ended with it
        assert (await box.exec_python(bomb)).status is not Status.OK
