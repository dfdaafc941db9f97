"""Layers whose activations are computed again: each keeps its input alone, and runs once more in the backward pass.

Chen et al. 2016 (arXiv 1604.06174). It changes memory and time, no value and no gradient: nothing in a layer is random,
for models are in eval mode. It knows layers, not models.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(layers: Sequence[nn.Module]) -> None:
    """From now on, for good. Before the layers are spread over ranks: those gather parameters around what is done here.

    A copy of a layer would still call the one that it was copied from: copies have to be made before.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
