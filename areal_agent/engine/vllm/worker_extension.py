"""What vLLM's workers can do besides: load a folder, or what the trainer sends, all of it. Imported by them.

They have an environment of their own, without areal_agent. On a CPU vLLM packs its weights, and a reload does not pack
a head again that is tied to the embedding: it would go on with the weights before. Nothing tells of that but the
numbers.

Adapters take the place of those before, also for answers under way: all name the same ones, by the number 1. vLLM's own
call loads them for requests that come after it.
"""

import importlib
import importlib.util
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

ADAPTER = "policy"  # as info.py has it
OURS = Path(__file__).parents[1] / "embedded"


def ours(name: str) -> Any:
    """A module of areal_agent that needs nothing of the rest, which is not there."""
    spec = importlib.util.spec_from_file_location(f"areal_agent_{name}", OURS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


transfer_group = ours("transfer_group")
weight_bytes = ours("weight_bytes")


class Reception:
    """One set of weights on its way into this process's memory, in a thread; `state` says how far it is."""

    def __init__(self, told: dict[str, Any], *, replica: int, num_workers: int, device: torch.device) -> None:
        self.state = "receiving"
        self.entries = told["entries"]
        self.data = torch.empty(0)
        self._told = told
        self._request = transfer_group.Request(
            what=told["name"], group=f"{told['group']}-{replica}", num_members=num_workers
        )
        self._device = device
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it has come to an end."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._receive()
            self.state = "proved"
        except Exception as error:  # the boundary of this thread: whoever asks for the state hears of it
            self.state = f"failed: {error!r}"

    def _receive(self) -> None:
        told = self._told
        # in the host's memory: vLLM leaves little of a GPU's
        data = torch.empty(told["num_bytes"], dtype=torch.uint8)
        transfer_group.receive(
            told["host"],
            told["port"],
            self._request,
            data,
            bucket_bytes=told["bucket_bytes"],
            device=self._device,
            timeout_s=told["timeout_s"],
        )
        found = weight_bytes.checksum(data)
        if found != told["checksum"]:
            raise ValueError(f"they came with checksum {found:#010x}, and {told['checksum']:#010x} was sent")
        self.data = data


class WeightLoading:
    """Mixed into vLLM's worker class by `--worker-extension-cls`, which is made for such methods."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    device: Any
    receptions: Mapping[str, Reception] = MappingProxyType({})  # by push

    def load_folder(self, path: str) -> None:
        """Take the weights of this folder. Nothing else is needed then."""
        self.reload_weights(weights_path=path)
        self._pack_tied_head()
        self.receptions = {}

    def receive_weights(self, push_id: str, told: str, beside: str) -> None:
        """Begin to receive a set of weights. Of those before only `beside` is kept.

        Replicas (`--data-parallel-size`) are groups of their own: they know nothing of each other.
        """
        kept = {name: one for name, one in self.receptions.items() if name == beside}
        parallel = self.parallel_config
        reception = Reception(
            json.loads(told),
            replica=parallel.data_parallel_index,
            num_workers=parallel.world_size,
            device=torch.device(self.device),
        )
        self.receptions = {**kept, push_id: reception}

    def received(self, push_id: str) -> str:
        """`receiving`, `proved`, or `failed` and why."""
        reception = self.receptions.get(push_id)
        return reception.state if reception is not None else f"failed: nothing came in push {push_id}"

    def load_received(self, push_id: str) -> None:
        """Take the weights that came in this push.

        Of several replicas vLLM lets the first one alone answer: the others may be behind, or have failed.
        """
        if push_id in self.receptions:
            self.receptions[push_id].wait()
        if (state := self.received(push_id)) != "proved":
            raise RuntimeError(state)
        reception = self.receptions[push_id]
        self.reload_weights(weights_iterator=weight_bytes.tensors_over(reception.data, reception.entries))
        self._pack_tied_head()

    def _pack_tied_head(self) -> None:
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)

    def load_adapter(self, path: str) -> None:
        """Take the adapters of this folder."""
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self.model_runner.lora_manager.add_adapter(request(ADAPTER, 1, path, load_inplace=True))
