"""Which backend: by its name, or the strongest that works on this machine."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from areal_agent.errors import SandboxError
from sandboxes.base import Provider
from sandboxes.bubblewrap import BubblewrapProvider
from sandboxes.containers.provider import DockerProvider
from sandboxes.jail import Walls
from sandboxes.spec import Isolation
from sandboxes.subprocess import SubprocessProvider

logger = logging.getLogger(__name__)

Backend = Literal["auto", "embedded", "docker", "bubblewrap", "namespaces", "subprocess"]
"""`auto` takes the strongest that works, `embedded` the strongest that needs no engine beside it. `bubblewrap` takes
namespaces by system calls where bubblewrap is missing; `namespaces` takes nothing else."""
ISOLATION_OF: dict[str, Isolation] = {
    "docker": Isolation.CONTAINER,
    "bubblewrap": Isolation.NAMESPACES,
    "namespaces": Isolation.NAMESPACES,
    "subprocess": Isolation.PROCESS,
}
BACKENDS = ("auto", "embedded", *ISOLATION_OF)

_Start = Callable[[], Awaitable[Provider]]
_CONTAINERS: tuple[Isolation, _Start] = (Isolation.CONTAINER, DockerProvider.start_with_default_image)
_JAILS: tuple[Isolation, _Start] = (Isolation.NAMESPACES, BubblewrapProvider.start)


async def start_provider(backend: Backend, min_isolation: Isolation | None) -> Provider:
    """The provider of a backend; nothing is left of one that isolates too little."""
    if backend not in BACKENDS:
        raise ValueError(f"sandbox backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    if backend in ("auto", "embedded"):
        isolating = (_CONTAINERS, _JAILS) if backend == "auto" else (_JAILS,)
        return await start_strongest(isolating, least_isolation(backend, min_isolation))
    refuse_less(backend, ISOLATION_OF[backend], least_isolation(backend, min_isolation))
    if backend == "docker":
        return await DockerProvider.start()
    if backend == "subprocess":
        return await SubprocessProvider.start()
    return await BubblewrapProvider.start((Walls.NAMESPACES,) if backend == "namespaces" else tuple(Walls))


def least_isolation(backend: Backend, min_isolation: Isolation | None) -> Isolation:
    """What there must be. Plain processes have to be asked for: by their name, or by a `min_isolation` that lets `auto`
    and `embedded` fall back on them.

    >>> least_isolation("auto", None), least_isolation("auto", Isolation.NONE), least_isolation("subprocess", None)
    (<Isolation.NAMESPACES: 'namespaces'>, <Isolation.NONE: 'none'>, <Isolation.NONE: 'none'>)
    """
    if min_isolation is not None:
        return min_isolation
    return Isolation.NAMESPACES if backend in ("auto", "embedded") else Isolation.NONE


async def start_strongest(isolating: Sequence[tuple[Isolation, _Start]], min_isolation: Isolation) -> Provider:
    """The first of these, strongest first, that works; else plain processes, as far as `min_isolation` lets."""
    refuse_less("strongest", isolating[0][0], min_isolation)
    reasons: list[str] = []
    for isolation, start in isolating:
        refuse_less(f"strongest that works here ({'; '.join(reasons)})", isolation, min_isolation)
        try:
            return await start()
        except SandboxError as error:
            reasons.append(str(error))
            logger.info("sandbox backend: not %s, for %s", isolation.value, error)
    refuse_less(f"strongest that works here ({'; '.join(reasons)})", Isolation.PROCESS, min_isolation)
    logger.warning("sandbox backend: subprocess, for %s", "; ".join(reasons))
    return await SubprocessProvider.start()


def refuse_less(backend: str, isolation: Isolation, min_isolation: Isolation) -> None:
    """SandboxError when a backend isolates less than is asked."""
    if not isolation.covers(min_isolation):
        raise SandboxError(
            f"min_isolation is {min_isolation.value!r}, the {backend} backend gives only {isolation.value!r}; "
            f"use a stronger backend, or ask for less (min_isolation={isolation.value!r})"
        )
