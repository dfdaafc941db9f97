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
        return await start_strongest(backend, isolating, min_isolation)
    refuse_less(backend, ISOLATION_OF[backend], min_isolation or Isolation.NONE)
    if backend == "docker":
        return await DockerProvider.start()
    if backend == "subprocess":
        return await SubprocessProvider.start()
    return await BubblewrapProvider.start((Walls.NAMESPACES,) if backend == "namespaces" else tuple(Walls))


async def start_strongest(
    backend: str, isolating: Sequence[tuple[Isolation, _Start]], min_isolation: Isolation | None
) -> Provider:
    """The first of these, strongest first, that works; else plain processes, where `min_isolation` lets. None does not:
    they have to be asked for, by that or by the name of their backend."""
    least = min_isolation or Isolation.NAMESPACES
    refuse_less("strongest", isolating[0][0], least)
    reasons: list[str] = []
    for isolation, start in isolating:
        refuse_less(_strongest_here(reasons), isolation, least)
        try:
            return await start()
        except SandboxError as error:
            reasons.append(str(error))
            logger.info("sandbox backend: not %s, for %s", isolation.value, error)
    if min_isolation is None:
        raise SandboxError(
            f"no sandbox that isolates works here ({'; '.join(reasons)}), and the {backend} backend does not go "
            "without unless it is told to; see python -m sandboxes doctor, or set min_isolation='none' (in the config "
            "of a run sandbox.min_isolation=none): programs are then limited, and not isolated from this machine"
        )
    refuse_less(_strongest_here(reasons), Isolation.PROCESS, least)
    logger.warning("sandbox backend: subprocess, for %s", "; ".join(reasons))
    return await SubprocessProvider.start()


def refuse_less(backend: str, isolation: Isolation, min_isolation: Isolation) -> None:
    """SandboxError when a backend isolates less than is asked."""
    if not isolation.covers(min_isolation):
        raise SandboxError(
            f"min_isolation is {min_isolation.value!r}, the {backend} backend gives only {isolation.value!r}; "
            f"use a stronger backend, or ask for less (min_isolation={isolation.value!r})"
        )


def _strongest_here(reasons: Sequence[str]) -> str:
    return f"strongest that works here ({'; '.join(reasons)})"
