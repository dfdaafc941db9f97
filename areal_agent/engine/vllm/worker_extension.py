"""What vLLM's workers can do besides: load a folder, or what the trainer sends, all of it. Imported by them.

They have an environment of their own, without areal_agent. On a CPU vLLM packs its weights, and a reload does not pack
a head again that is tied to the embedding: it would go on with the weights before. Nothing tells of that but the
numbers.

Adapters take the place of those before, also for answers under way: all name the same ones, by the number 1. vLLM's own
call loads them for requests that come after it.
"""

import importlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

ADAPTER = "policy"  # as info.py has it
RECEPTION = Path(__file__).parents[1] / "foreign" / "reception.py"


reception = SimpleNamespace(**runpy.run_path(str(RECEPTION)))  # areal_agent is not there


class WeightLoading:
    """Mixed into vLLM's worker class by `--worker-extension-cls`, which is made for such methods."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    device: Any
    receptions: Mapping[str, Any] = MappingProxyType({})  # by push

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
        begun = reception.Reception(
            told,
            group=str(parallel.data_parallel_index),
            num_members=parallel.world_size,
            device=torch.device(self.device),
        )
        self.receptions = {**kept, push_id: begun}

    def received(self, push_id: str) -> str:
        """`receiving`, `proved`, or `failed` and why."""
        return reception.state_of(self.receptions, push_id)

    def load_received(self, push_id: str) -> None:
        """Take the weights that came in this push.

        Of several replicas vLLM lets the first one alone answer: the others may be behind, or have failed.
        """
        self.reload_weights(weights_iterator=reception.tensors_of(self.receptions, push_id))
        self._pack_tied_head()

    def _pack_tied_head(self) -> None:
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)

    def load_adapter(self, path: str) -> None:
        """Take the adapters of this folder."""
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self.model_runner.lora_manager.add_adapter(request(ADAPTER, 1, path, load_inplace=True))
