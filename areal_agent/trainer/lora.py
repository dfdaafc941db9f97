"""Low-rank adapters: linear layers whose weight stands still, beside two thin matrices that are trained in its place.

LoRA (Hu et al. 2021, arXiv 2106.09685). I inputs, O outputs, R the rank:

    y = x W^T + b + (alpha / R) (x A^T) B^T        W [O, I] and b [O] frozen; A [R, I] random, B [O, R] zero at first

so a model with new adapters is the model without. Merged, the layer is a plain one of weight W + (alpha / R) B A.
It knows models as trees of modules, not losses, optimisers or files. With several ranks, matrices may be spread.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from areal_agent.errors import ConfigError
from areal_agent.trainer.config import LoraConfig
from areal_agent.trainer.group import whole


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Weight and bias are those of the layer that it replaces: no copy is made."""

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, device="meta")
        bound = 1 / math.sqrt(layer.in_features)
        begun = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A.weight = nn.Parameter(begun.to(layer.weight.device))
        self.lora_B.weight = nn.Parameter(torch.zeros(layer.out_features, rank, device=layer.weight.device))
        self.scale = scale
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        plain = super().forward(input)  # [..., O]
        return plain + self.scale * self.lora_B(self.lora_A(input)) if self.is_on else plain

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The weight of the plain layer that computes the same, from this one's three matrices, in float32.

        Shapes: [O, I], [R, I], [O, R] -> [O, I].
        """
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale)


class Adapter:
    """All adapters of one model: what is trained of it, and nothing else is."""

    def __init__(self, layers: Mapping[str, LoraLinear]) -> None:
        """By the name of the layer in the model."""
        self._layers = layers

    @classmethod
    def attach(
        cls, model: nn.Module, inside: Iterable[nn.Module], config: LoraConfig, seed: int, *, is_gpu: bool = False
    ) -> Self:
        """Freeze `model`, and give adapters to the linear layers inside these parts of it that the config names.

        Raises ConfigError for a name that no linear layer there has. Every rank makes the same ones. On a GPU, where
        those layers compute in bfloat16, frozen weights that were made in it are held in it, too.
        """
        found = _linear_layers(model, inside)
        known = {_last(name) for name in found}
        if unknown := [name for name in config.target_modules if name not in known]:
            raise ConfigError(
                f"trainer.lora.target_modules names {unknown[0]!r}, and the model's layers have no linear layer of "
                f"that name; they have {', '.join(sorted(known))}"
            )
        model.requires_grad_(False)
        if is_gpu:
            for layer in found.values():
                _halve(layer)
        generator = torch.Generator().manual_seed(seed)
        layers: dict[str, LoraLinear] = {}
        for name, layer in found.items():
            if _last(name) in config.target_modules:
                layers[name] = LoraLinear(layer, rank=config.rank, scale=config.scale, generator=generator)
                model.set_submodule(name, layers[name])
        return cls(layers)

    def parameters(self) -> dict[str, Tensor]:
        """What is trained, by its name in the model; where there are several ranks, the shard of this one."""
        return dict(self._named())

    @contextmanager
    def off(self) -> Generator[None]:
        """Inside, the model computes what it did without adapters."""
        self._switch(is_on=False)
        try:
            yield
        finally:
            self._switch(is_on=True)

    def merged(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A parameter of the model as it is without adapters, in one piece; what has one is merged with it, in `dtype`.

        Every rank has to ask.
        """
        layer = self._layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is None:
            return whole(parameter.detach())
        a, b = whole(layer.lora_A.weight.detach()), whole(layer.lora_B.weight.detach())
        return layer.merge(whole(parameter.detach()), a, b).to(dtype)

    def merge(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of the model as it is without adapters, from that with them, in one piece."""
        trained = self.parameters()
        merged = {name: one.float() for name, one in state.items() if name not in trained}
        for name, layer in self._layers.items():
            weight, a, b = f"{name}.weight", f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            merged[weight] = layer.merge(state[weight], state[a], state[b])
        return merged

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers.items():
            yield f"{name}.lora_A.weight", layer.lora_A.weight
            yield f"{name}.lora_B.weight", layer.lora_B.weight

    def _switch(self, *, is_on: bool) -> None:
        for layer in self._layers.values():
            layer.is_on = is_on


def _linear_layers(model: nn.Module, inside: Iterable[nn.Module]) -> dict[str, nn.Linear]:
    within = {id(module) for part in inside for module in part.modules()}
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in within
    }


def _halve(layer: nn.Linear) -> None:
    """Hold a frozen weight in bfloat16 where that loses nothing, as with most models from a hub."""
    half = layer.weight.detach().to(torch.bfloat16)
    if torch.equal(half.float(), layer.weight):
        layer.weight = nn.Parameter(half, requires_grad=False)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
