"""What vLLM's workers can do besides: load a folder, all of it. Imported by them, in vLLM's own environment.

On a CPU vLLM packs its weights, and a reload does not pack a head again that is tied to the embedding: it would go on
with the weights before. Nothing tells of that but the numbers.
"""

from typing import Any


class FolderLoading:
    """Mixed into vLLM's worker class by `--worker-extension-cls`, which is made for such methods."""

    model_runner: Any
    reload_weights: Any

    def load_folder(self, path: str) -> None:
        """Take the weights of this folder."""
        self.reload_weights(weights_path=path)
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
