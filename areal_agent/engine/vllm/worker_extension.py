"""Methods for vLLM's workers, which import this file: load a folder's weights, or receive them from the trainer.

Their environment has no areal_agent. On a CPU vLLM packs its weights, and a reload packs neither a head that is tied to
the embedding, which would silently keep the old weights, nor experts, which would be read as if they were packed.

New adapters replace the old ones even for answers in progress, because all requests name the same adapters, number 1.
vLLM's own call would load them for later requests only.
"""

import importlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

ADAPTER = "policy"  # as server.py has it
RECEPTION = Path(__file__).parents[1] / "foreign" / "reception.py"


reception = SimpleNamespace(
    **runpy.run_path(str(RECEPTION))
)  # loaded by path, because areal_agent is not installed there


class WeightLoading:
    """Methods that vLLM mixes into its worker class by `--worker-extension-cls`."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    device: Any
    receptions: Mapping[str, Any] = MappingProxyType({})  # by push

    def load_folder(self, path: str) -> None:
        """Load the weights of this folder, and drop those that were received."""
        self.reload_weights(weights_path=path)
        self._pack_again()
        self.receptions = {}

    def receive_weights(self, push_id: str, told: str, beside: str) -> None:
        """Start to receive a set of weights. Of the earlier ones, only `beside` is kept.

        Replicas (`--data-parallel-size`) do not know each other, so each is a group of its own.
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
        """Return `receiving`, `proved`, or `failed` with the reason."""
        return reception.state_of(self.receptions, push_id)

    def load_received(self, push_id: str) -> None:
        """Load the weights received in this push.

        With several replicas, vLLM returns only the first one's answer; the others may be behind, or have failed.
        """
        self.reload_weights(weights_iterator=reception.tensors_of(self.receptions, push_id))
        self._pack_again()

    def _pack_again(self) -> None:
        is_cpu = torch.device(self.device).type == "cpu"
        for layer in self.model_runner.get_model().modules() if is_cpu else ():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

    def load_adapter(self, path: str) -> None:
        """Load the adapters of this folder."""
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self.model_runner.lora_manager.add_adapter(request(ADAPTER, 1, path, load_inplace=True))
