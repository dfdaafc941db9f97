"""How many CPU threads engine and trainer compute with where `engine.threads` or `trainer.threads` is `auto`.

`share_out` is the rule: one thread for a small model; else half of the cores each. Imports no torch.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from areal_agent.dtype import LARGE
from areal_agent.files import no_device

MOST = 1024


def _checked(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST):
        return value
    raise PydanticCustomError("threads", "give a whole number from 1 to {most}, or 'auto'", {"most": MOST})


Threads = Annotated[int | Literal["auto"], BeforeValidator(_checked)]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_for(model: Path) -> int:
    """Return the cores that a model can make use of. One that is not here is of the hub, and taken for large."""
    try:
        fields: dict[str, Any] = orjson.loads(no_device(model / "config.json").read_bytes())
        return num_cores() if fields.get("text_config", fields)["hidden_size"] >= LARGE else 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whoever loads the model reports a damaged file
        return num_cores()


def is_on_cpu(device: str) -> bool:
    """Return whether a `device` is the CPU of this machine, without loading torch."""
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def share_out(cores: int, engine: Threads, num_servers: int, trainer: Threads, num_ranks: int) -> tuple[int, int]:
    """Return the threads of each server and of each rank; 0 servers or ranks if they compute elsewhere.

    What numbers leave of the cores is for the sides that are `auto`: half of it for the processes of each, the larger
    one for the trainer's, and all of it for a side that is alone.

    >>> share_out(2, "auto", 1, "auto", 1), share_out(7, "auto", 1, "auto", 1), share_out(8, "auto", 0, "auto", 2)
    ((1, 1), (3, 4), (1, 4))
    >>> share_out(8, "auto", 2, 1, 1), share_out(2, 3, 1, "auto", 1)
    ((3, 1), (3, 1))
    """
    sides: list[tuple[Threads, int]] = [(engine, num_servers), (trainer, num_ranks)]
    left = cores - sum(threads * number for threads, number in sides if threads != "auto")
    num_auto = sum(threads == "auto" and number > 0 for threads, number in sides)
    shares = (left // 2, left - left // 2) if num_auto == 2 else (left, left)

    def each(threads: Threads, number: int, share: int) -> int:
        return threads if threads != "auto" else max(1, share // number) if number else 1

    return each(engine, num_servers, shares[0]), each(trainer, num_ranks, shares[1])
