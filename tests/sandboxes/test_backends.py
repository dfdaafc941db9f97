"""Which backend `auto` and `embedded` take where nothing isolates:

- none, unless plain processes are allowed: the error says why and how
- plain processes where they are, with a warning that says why
- the next strongest where the strongest does not work
"""

import logging

import pytest

from areal_agent.errors import SandboxError
from sandboxes.base import Provider
from sandboxes.pool import start_strongest
from sandboxes.spec import Isolation
from sandboxes.subprocess import SubprocessProvider


async def broken() -> Provider:
    raise SandboxError("no daemon answers")


async def working() -> Provider:
    return await SubprocessProvider.start()


@pytest.mark.parametrize("backend", ["auto", "embedded"])
async def test_plain_processes_are_never_taken_unasked(backend: str) -> None:
    with pytest.raises(SandboxError, match=rf"no daemon answers.*the {backend} backend .*sandbox\.min_isolation=none"):
        await start_strongest(backend, [(Isolation.CONTAINER, broken)], None)


async def test_where_they_are_allowed_a_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        provider = await start_strongest("auto", [(Isolation.CONTAINER, broken)], Isolation.NONE)
    try:
        assert provider.capabilities().isolation is Isolation.PROCESS
        assert "subprocess, for no daemon answers" in caplog.text
    finally:
        await provider.close()


async def test_the_next_strongest_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    isolating = [(Isolation.CONTAINER, broken), (Isolation.NAMESPACES, working)]
    with caplog.at_level(logging.WARNING):
        provider = await start_strongest("auto", isolating, None)
    await provider.close()
    assert "subprocess, for" not in caplog.text
