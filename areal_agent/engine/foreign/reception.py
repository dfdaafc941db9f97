"""Receives weights from the trainer in a process of an SGLang or vLLM server, while that samples.

It is loaded by its path, because servers have their own environments without areal_agent, and uses only the standard
library and torch. It yields bytes whose checksum was verified, and tensors over them.
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
    """Receives one set of weights into this process's memory, in a thread. `state` is its progress."""

    def __init__(self, told: str, *, group: str, num_members: int, device: torch.device) -> None:
        """Start to receive the weights that `told` describes, together with the other members of `group`."""
        self.state = "receiving"
        self._told = json.loads(told)
        self._data = torch.empty(0)
        self._group = {"group": f"{self._told['group']}-{group}", "num_members": num_members, "device": device}
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield verified tensors by name, in the host's memory."""
        return transfer.tensors_over(self._data, self._told["entries"])

    def _run(self) -> None:
        try:
            self._receive()
            self.state = PROVED
        except Exception as error:  # the boundary of this thread; the error is reported in the state
            self.state = f"failed: {error!r}"

    def _receive(self) -> None:
        # in the host's memory, because servers leave little of a GPU's
        data = torch.empty(sum(part["num_bytes"] for part in self._told["parts"]), dtype=torch.uint8)
        transfer.take(self._told, data, **self._group)
        self._data = data


def state_of(receptions: Mapping[str, Reception], push_id: str) -> str:
    """Return `receiving`, `proved`, or `failed` with the reason."""
    return receptions[push_id].state if push_id in receptions else f"failed: nothing was received in push {push_id}"


def tensors_of(receptions: Mapping[str, Reception], push_id: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what this push sent. Raises RuntimeError unless all of it has arrived and was verified."""
    if push_id in receptions:
        receptions[push_id].wait()
    if (state := state_of(receptions, push_id)) != PROVED:
        raise RuntimeError(state)
    return receptions[push_id].tensors()
