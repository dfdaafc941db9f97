"""Layers that torch.compile fuses, as far as a trial shows that they then compute the same.

    layer.forward ─▶ is_on: compiled, in graphs around its attention, once for rows of all lengths
                     else:  as it was

Elementwise work between products is then one pass over activations, and only what products and attention return is kept
for the backward pass: all else is computed again from it.
The trial is on one sequence of the first micro-batch, while engines already sample: the policy's gradient has to be
that of the layers as they are. Where a compiler is missing or fails, or the gradient differs, one line of the log says
so, and the layers run as they are. What is compiled later (without gradients, for a critic) is not tried. torch itself
bounds how often it compiles one function again; beyond, it runs that as it is.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functions

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]
TOLERANCE = 0.3
"""Of the distance of two gradients, over the norm of one. Roundings to bfloat16 differ by some hundredths."""

KEPT = 0.8
"""The share of what torch would keep for the backward pass that it may keep. Inputs of products, which are cheap to
compute again from what is kept anyway, are a quarter; the rest would take products."""


def fused(forward: Forward) -> Forward:
    """Return what torch.compile makes of a layer's forward pass, for rows of any length."""
    functions.activation_memory_budget = KEPT  # it is read whenever something is compiled
    return torch.compile(forward, dynamic=True)


class Compiled:
    """Layers of one or more models that run compiled, or, once the trial has failed, as they are."""

    def __init__(self, fuse: Callable[[Forward], Forward] = fused) -> None:
        self._fuse = fuse
        self.is_on = True
        self.is_tried = False

    def take(self, layers: Sequence[nn.Module]) -> None:
        """Have layers run compiled. Copies of a model have to be made before: they would call the original's."""
        for layer in layers:
            layer.forward = self._either(layer.forward)

    def _either(self, plain: Forward) -> Forward:
        compiled = self._fuse(plain)
        return lambda *args, **more: (compiled if self.is_on else plain)(*args, **more)

    def try_out(self, compute: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
        """Compare both ways by the gradient of the sum of `compute()` with respect to `parameters`, once.

        Nothing is added to the parameters' own gradients.
        """
        self.is_on = False
        plain = _gradient(compute, parameters)
        self.is_tried, self.is_on, started_s = True, True, time.perf_counter()
        try:
            distance = _distance(_gradient(compute, parameters), plain)
            fault = None if distance <= TOLERANCE else f"their gradient differs by {distance:.2g} of its norm"  # or NaN
        except Exception as error:  # a boundary: compilers fail in many ways
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.is_on = fault is None
        if fault is None:
            logger.info("layers run compiled (trainer.compile), which took %.0f s", time.perf_counter() - started_s)
        else:
            logger.warning("layers run as they are, and slower, since compiled ones (trainer.compile) fail: %s", fault)


def _gradient(compute: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(compute().sum(), parameters, allow_unused=True)
    return [one for one in found if one is not None]  # pyright: ignore[reportUnnecessaryComparison]


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference over that of what is expected; 0 where nothing differs."""
    away = sum(float((ours - theirs).float().square().sum()) for ours, theirs in zip(found, expected, strict=True))
    size = sum(float(one.float().square().sum()) for one in expected)
    return (away / size) ** 0.5 if away else 0.0
