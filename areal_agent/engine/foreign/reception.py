"""Weights that come from the trainer into a process of a server which is not ours, while that samples.

Loaded by its path: servers have environments of their own, without areal_agent. Standard library and torch alone. It
knows no server and no model: what came is bytes, proved by their checksum, and tensors over them.
"""

import json
import runpy
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch

TRANSFER = Path(__file__).parents[1] / "embedded" / "transfer.py"
PROVED = "proved"

transfer = SimpleNamespace(**runpy.run_path(str(TRANSFER)))


class Reception:
    """One set of weights on its way into this process's memory, in a thread; `state` says how far it is."""

    def __init__(self, told: str, *, group: str, num_members: int, device: torch.device) -> None:
        """Of what is `told`, together with the other members of `group`, which compute on `device` each."""
        self.state = "receiving"
        self._told = json.loads(told)
        self._data = torch.empty(0)
        name = f"{self._told['group']}-{group}"
        self._request = transfer.Request(what=self._told["name"], group=name, num_members=num_members)
        self._device = device
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it has come to an end."""
        self._thread.join()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By name, in the host's memory; of those that are proved."""
        return transfer.tensors_over(self._data, self._told["entries"])

    def _run(self) -> None:
        try:
            self._receive()
            self.state = PROVED
        except Exception as error:  # the boundary of this thread: whoever asks for the state hears of it
            self.state = f"failed: {error!r}"

    def _receive(self) -> None:
        told = self._told
        # in the host's memory: servers leave little of a GPU's
        data = torch.empty(told["num_bytes"], dtype=torch.uint8)
        transfer.receive(
            told["host"],
            told["port"],
            self._request,
            data,
            bucket_bytes=told["bucket_bytes"],
            device=self._device,
            timeout_s=told["timeout_s"],
        )
        found = transfer.checksum(data)
        if found != told["checksum"]:
            raise ValueError(f"they came with checksum {found:#010x}, and {told['checksum']:#010x} was sent")
        self._data = data


def state_of(receptions: Mapping[str, Reception], push_id: str) -> str:
    """`receiving`, `proved`, or `failed` and why."""
    return receptions[push_id].state if push_id in receptions else f"failed: nothing came in push {push_id}"


def tensors_of(receptions: Mapping[str, Reception], push_id: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What came in this push. Raises RuntimeError unless all of it has come, and is what was sent."""
    if push_id in receptions:
        receptions[push_id].wait()
    if (state := state_of(receptions, push_id)) != PROVED:
        raise RuntimeError(state)
    return receptions[push_id].tensors()
