"""The policy that is trained: a transformers causal language model and its forward pass over loss tokens.

It knows micro-batches, not losses or optimisers. With several ranks its parameters are spread over them (`shard`).
"""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_agent.algorithms.batching import MicroBatch
from areal_agent.algorithms.logprobs import logprobs_and_entropy
from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import use_segment_attention
from areal_agent.trainer.config import LoraConfig
from areal_agent.trainer.group import ALONE, Group, whole
from areal_agent.trainer.lora import Adapter
from areal_agent.trainer.recomputation import recompute


def choose_device(name: str, *, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """`auto`, `cpu` or `cuda` as the device of one rank. Raises ConfigError for more ranks than CUDA devices."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device is 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    if num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.num_ranks is {num_ranks}, but torch sees {torch.cuda.device_count()} CUDA devices, and each rank "
            "needs one; lower it, or set trainer.device to 'cpu'"
        )
    return torch.device("cuda", rank)


def mixed_precision(device: torch.device) -> torch.autocast:
    """On cuda matrices are multiplied in bfloat16; elsewhere nothing changes."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Measured(Protocol):
    """What log-probabilities are taken of."""

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the micro-batch's loss tokens, [M] each, at the rollouts' temperatures."""
        ...


class Policy:
    """A causal language model with float32 weights; on cuda its matrices are multiplied in bfloat16."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        # eval mode: dropout would make the proximal and the current policy differ without an update
        self.model = model.to(device).eval()  # pyright: ignore[reportArgumentType]
        self.device = device
        self.adapter: Adapter | None = None
        self._group = ALONE
        _choose_attention(self.model)
        self._loss_tokens = LossTokenForward(self.model)

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

    def adapt(self, config: LoraConfig, seed: int) -> None:
        """From now on train adapters alone. Copies (`backbone`) that are to be trained whole have to be made before."""
        is_gpu = self.device.type == "cuda"
        self.adapter = Adapter.attach(self.model, decoder_layers(self._decoder), config, seed, is_gpu=is_gpu)

    def backbone(self) -> nn.Module:
        """A copy of everything below the output layer, with parameters of its own."""
        return copy.deepcopy(self._decoder)

    def recompute_layers(self) -> None:
        """Keep little for the backward pass, and compute it again there. Copies (`backbone`) have to be made before."""
        recompute(decoder_layers(self._decoder))

    def shard(self, group: Group) -> None:
        """Spread the parameters over the ranks of `group`. Copies (`backbone`) have to be made before."""
        group.shard(decoder_layers(self._decoder), self._loss_tokens)
        self._group = group

    @property
    def publish_dtype(self) -> torch.dtype:
        """What an engine on the same kind of device computes in."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def trained_parameters(self) -> dict[str, Tensor]:
        """By name; where there are several ranks, the shard of this one."""
        return self.named_parameters() if self.adapter is None else self.adapter.parameters()

    def named_parameters(self) -> dict[str, Tensor]:
        """All of the model but adapters, by name, tied weights once; of several ranks, the shard of this one."""
        adapters = {} if self.adapter is None else self.adapter.parameters()
        return {name: one for name, one in self.model.named_parameters() if name not in adapters}

    def whole_parameters(self) -> dict[str, Tensor]:
        """As `named_parameters`, in one piece, merged with adapters. Every rank has to ask; all but rank 0 are given
        nothing."""
        parameters = ((name, self._whole(name, one)) for name, one in self.named_parameters().items())
        if self._group.rank == 0:
            return dict(parameters)
        for _ in parameters:
            pass  # its part in gathering
        return {}

    def whole_adapter(self) -> dict[str, Tensor]:
        """Adapters by name, in one piece. Every rank has to ask, and is given them."""
        return {name: whole(one.detach()) for name, one in self.trained_parameters().items()}

    def without_adapter(self) -> "WithoutAdapter":
        """The model that adapters were given to, in the same memory."""
        assert self.adapter is not None, "there is nothing to leave out"
        return WithoutAdapter(self, self.adapter)

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the micro-batch's loss tokens, [M] each, at the rollouts' temperatures."""
        with mixed_precision(self.device):
            return self._loss_tokens(batch)

    def _whole(self, name: str, parameter: Tensor) -> Tensor:
        if self.adapter is None:
            return whole(parameter.detach())
        return self.adapter.merged(name, parameter, self.publish_dtype)

    @property
    def _decoder(self) -> nn.Module:
        return self.model.base_model


class WithoutAdapter:
    """A policy as it was before it was trained: the reference of one that has adapters."""

    def __init__(self, policy: Policy, adapter: Adapter) -> None:
        self._policy = policy
        self._adapter = adapter

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As that of the policy."""
        with self._adapter.off():
            return self._policy.logprobs_and_entropy(batch)


class LossTokenForward(nn.Module):
    """The forward pass as one module, which is what FSDP2 gathers parameters for: states, then the output layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._vocab_size = int(model.config.get_text_config().vocab_size)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        hidden = hidden_states(self.model.base_model, batch)  # [M, H]
        head = cast(nn.Module, self.model.get_output_embeddings())
        return logprobs_and_entropy(hidden, batch.targets, batch.temperatures, head, vocab_size=self._vocab_size)


def hidden_states(decoder: nn.Module, batch: MicroBatch) -> Tensor:
    """The last hidden states that loss tokens are predicted from, [M, H]."""
    states = decoder(
        input_ids=batch.inputs, position_ids=batch.positions, segments=batch.segments, use_cache=False
    ).last_hidden_state  # [R, T, H]
    return states.flatten(0, 1)[batch.predicting]


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The layers of a decoder: what is gathered and let go of together."""
    return [layer for one in decoder.children() if isinstance(one, nn.ModuleList) for layer in one]


def _choose_attention(model: PreTrainedModel) -> None:
    """Switch to attention by segments, and refuse models whose logits are then not what they were.

    They are not for a model with another attention than plain causal, or whose logits are not just its output layer
    applied to its last hidden state.
    """
    probe = torch.arange(4, device=model.device)[None] % int(model.config.get_text_config().vocab_size)
    positions = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        logits = model(input_ids=probe, use_cache=False).logits
        use_segment_attention(model)
        states = model.base_model(input_ids=probe, position_ids=positions, segments=(4,), use_cache=False)
        ours = cast(nn.Module, model.get_output_embeddings())(states.last_hidden_state)
    if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"model type {model.config.model_type!r} is not supported: its logits are not its output layer applied to "
            "its last hidden state, or its attention is not plain causal attention; use a Llama, Mistral or Qwen model"
        )
