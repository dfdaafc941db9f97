"""The policy that is trained: a transformers causal language model and its padded forward pass over loss tokens.

It knows micro-batches, not losses or optimisers.
"""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_agent.algorithms.batching import MicroBatch
from areal_agent.algorithms.logprobs import logprobs_and_entropy
from areal_agent.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device. Raises ConfigError for cuda where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device is 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def mixed_precision(device: torch.device) -> torch.autocast:
    """On cuda matrices are multiplied in bfloat16; elsewhere nothing changes."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Policy:
    """A causal language model with float32 weights; on cuda its matrices are multiplied in bfloat16."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        # eval mode: dropout would make the proximal and the current policy differ without an update
        self.model = model.to(device).eval()  # pyright: ignore[reportArgumentType]
        self.device = device
        self._decoder = model.base_model
        self._head = cast(nn.Module, model.get_output_embeddings())
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._check_head()

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """Load a Hugging Face folder (safetensors only). Raises ConfigError when it holds no model of ours."""
        what = f"cannot load a causal language model from {str(folder)!r}"
        try:
            model, loaded = cast(
                tuple[PreTrainedModel, Mapping[str, Collection[str]]],
                AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=torch.float32,
                    use_safetensors=True,
                    trust_remote_code=False,
                    local_files_only=True,
                    output_loading_info=True,
                ),
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{what}: {str(error).strip().splitlines()[0]}") from error
        if loaded["missing_keys"]:  # transformers would go on with random numbers in their place
            raise ConfigError(f"{what}: its files lack the weights {sorted(loaded['missing_keys'])[:3]}")
        return cls(model, device)

    def frozen(self) -> Self:
        """This policy, never to be trained: a reference."""
        self.model.requires_grad_(False)
        return self

    def backbone(self) -> nn.Module:
        """A copy of everything below the output layer, with parameters of its own."""
        return copy.deepcopy(self._decoder)

    @property
    def publish_dtype(self) -> torch.dtype:
        """What an engine on the same kind of device computes in."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def named_parameters(self) -> dict[str, Tensor]:
        """By name; tied weights once."""
        return dict(self.model.named_parameters())

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the micro-batch's loss tokens, [M] each, at the rollouts' temperatures."""
        with mixed_precision(self.device):
            hidden = self._hidden(batch.inputs).flatten(0, 1)[batch.predicting]  # [M, H]
            return logprobs_and_entropy(
                hidden, batch.targets, batch.temperatures, self._head, vocab_size=self._vocab_size
            )

    def _hidden(self, inputs: Tensor) -> Tensor:
        """[S, T] -> [S, T, H]. Causal attention alone isolates padding on the right: it needs no mask."""
        return self._decoder(input_ids=inputs, use_cache=False).last_hidden_state

    def _check_head(self) -> None:
        """Log-probabilities are computed from hidden state and head; refuse models whose logits are not just that."""
        probe = torch.arange(4, device=self.device)[None] % self._vocab_size
        with torch.no_grad():
            logits = self.model(input_ids=probe, use_cache=False).logits
            ours = self._head(self._hidden(probe))
        if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3):
            kind = self.model.config.model_type
            raise ConfigError(
                f"model type {kind!r} is not supported: its logits are not its output layer applied to its last hidden "
                "state; use a Llama, Mistral or Qwen model"
            )
