"""A model of one rank that computes in bfloat16 while its weights and gradients are float32.

    weights, float32 ── copied once for all micro-batches ──▶ copies in bfloat16: the module's parameters within `on`
       ▲ gradient, float32 ◀── added for each micro-batch ───────┘

Several ranks have FSDP2 for this, which copies weights for each layer and micro-batch, there and back. For one rank
that takes the CPU longer than the layers themselves, and a GPU waits for it. Outside `on` copies take no memory.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Halves:
    """The copies of the float32 parameters of modules. Parameters that modules share are copied once.

    Where the rest of a model computes in float32, `modules` are its layers and `casts` is true: what a layer is called
    with is cast to bfloat16, and what it returns to float32.
    """

    def __init__(self, modules: Sequence[nn.Module], *, casts: bool = False) -> None:
        self._halves: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._is_on = False
        for part in (part for module in modules for part in module.modules()):
            parameters: dict[str, nn.Parameter | None] = vars(part)["_parameters"]
            for name, one in parameters.items():
                if one is not None and one.dtype == torch.float32:
                    if one not in self._halves:
                        self._halves[one] = _half_of(one)
                    self._places.append((parameters, name, one))
        for module in modules if casts else ():
            module.register_forward_pre_hook(self._given, with_kwargs=True)
            module.register_forward_hook(self._returned)

    @contextmanager
    def on(self) -> Generator[None]:
        """Within the context the modules have the copies. Make backward passes in it, too. It may be nested."""
        if self._is_on:
            yield
            return
        self._is_on = True
        try:
            with torch.no_grad():
                for weight, half in self._halves.items():
                    half.untyped_storage().resize_(half.numel() * half.itemsize)
                    half.copy_(weight)
            for parameters, name, weight in self._places:
                parameters[name] = self._halves[weight]
            yield
        finally:
            for parameters, name, weight in self._places:
                parameters[name] = weight
            for half in self._halves.values():
                half.untyped_storage().resize_(0)
            self._is_on = False

    def _given(self, _: nn.Module, args: Any, more: Any) -> Any:
        return _cast((args, more), torch.bfloat16) if self._is_on else (args, more)

    def _returned(self, _: nn.Module, __: Any, output: Any) -> Any:
        return _cast(output, torch.float32) if self._is_on else output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a value."""
    return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, value)


def _half_of(weight: nn.Parameter) -> nn.Parameter:
    """Return an empty copy, which hands its gradient on as soon as a backward pass has all of it."""
    half = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
    if weight.requires_grad:
        half.register_post_accumulate_grad_hook(partial(_hand_on, weight))
    half.untyped_storage().resize_(0)
    return half


def _hand_on(weight: nn.Parameter, half: Tensor) -> None:
    gradient, half.grad = half.grad, None
    assert gradient is not None, "the hook is called with a gradient"
    if weight.grad is None:
        weight.grad = gradient.float()
    else:
        weight.grad.add_(gradient)
