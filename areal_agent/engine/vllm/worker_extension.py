"""Methods for vLLM's workers, which import this file: load a folder's weights, or receive them from the trainer.

Their environment has no areal_agent. On a CPU vLLM packs its weights, and a reload packs neither a head that is tied to
the embedding, which would silently keep the old weights, nor experts, which would be read as if they were packed. For
some layers it keeps old weights and only warns in the log: gpt-oss's are loaded here, and others are an error.

New adapters replace the old ones even for answers in progress, because all requests name the same adapters, number 1.
vLLM's own call would load them for later requests only.
"""

import importlib
import logging
import runpy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

ADAPTER = "policy"  # as server.py has it
COPIED = {"GptOssRoutedExperts": ".experts.", "OAIAttention": ".sinks"}
"""Layers whose tensors vLLM copies where a reload does not look for them, with a part of the tensors' names."""
HEAD = "ParallelLMHead"
RELOADING = "vllm.model_executor.model_loader.reload.layerwise"
RECEPTION = Path(__file__).parents[1] / "foreign" / "reception.py"


reception = SimpleNamespace(
    **runpy.run_path(str(RECEPTION))
)  # loaded by path, because areal_agent is not installed there


class Warnings(logging.Handler):
    """The classes of the layers that vLLM warns of having kept."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.layers: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if "Failed to load weights" in record.msg and isinstance(record.args, tuple):
            self.layers.add(str(record.args[0]))


class WeightLoading:
    """Methods that vLLM mixes into its worker class by `--worker-extension-cls`."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    device: Any
    receptions: Mapping[str, Any] = MappingProxyType({})  # by push

    def load_folder(self, path: str) -> None:
        """Load the weights of this folder, and drop those that were received."""
        files = sorted(Path(path).glob("*.safetensors"))
        self._reload(lambda: (one for file in files for one in load_file(file).items()), weights_path=path)
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
        self._reload(lambda: reception.tensors_of(self.receptions, push_id))

    def _reload(self, tensors: Callable[[], Iterable[tuple[str, Any]]], weights_path: str | None = None) -> None:
        logger, warnings, model = logging.getLogger(RELOADING), Warnings(), self.model_runner.get_model()
        logger.addHandler(warnings)
        try:
            if weights_path is None:
                self.reload_weights(weights_iterator=tensors())
            else:
                self.reload_weights(weights_path=weights_path)
        finally:
            logger.removeHandler(warnings)
        if HEAD in warnings.layers and self.model_runner.model_config.hf_text_config.tie_word_embeddings:
            warnings.layers.remove(HEAD)  # it is loaded as the embedding
        layers = [one for one in model.modules() if list(one.parameters(recurse=False))]
        kept = [one for one in layers if type(one).__name__ in warnings.layers]
        if unknown := sorted({type(one).__name__ for one in kept} - COPIED.keys()):
            raise RuntimeError(
                f"vLLM cannot load new weights of {', '.join(unknown)} into a running server, and kept the old ones: "
                "use SGLang for this model"
            )
        if kept:
            parts = [COPIED[type(one).__name__] for one in kept]
            model.load_weights((name, one) for name, one in tensors() if any(part in name for part in parts))
        for layer in kept:
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
        self._pack_again()

    def _pack_again(self) -> None:
        is_cpu = torch.device(self.device).type == "cpu"
        for layer in self.model_runner.get_model().modules() if is_cpu else ():
            if type(layer).__name__ == HEAD and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

    def load_adapter(self, path: str) -> None:
        """Load the adapters of this folder."""
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self.model_runner.lora_manager.add_adapter(request(ADAPTER, 1, path, load_inplace=True))
