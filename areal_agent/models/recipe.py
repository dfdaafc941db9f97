"""Every number of the tiny model: its shape, and how it is warm-started. It knows no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Shape, tokenizer and warm start; about a million parameters."""

    version: int = 1  # raise it when the code that follows the recipe changes what it builds

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 6
    head_dim: int = 32
    rope_theta: float = 1_000.0  # positions matter within a hundred tokens
    max_context_tokens: int = 1024

    vocab_size: int = 1024  # at most; the demonstrations decide
    num_tokenizer_conversations: int = 4_000

    batch_size: int = 16  # conversations
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    num_warmup_steps: int = 30

    check_every: int = 25  # steps between two looks at how well it copies
    num_check_conversations: int = 128
    copy_gate: float = 0.9  # copying at least this well starts the decay of the learning rate
    typical_gate_steps: int = 150  # for the progress bar
    max_gate_steps: int = 500  # the decay starts here at the latest
    num_decay_steps: int = 150


RECIPE = Recipe()

DEMONSTRATIONS = "envs.calculator.demonstrations:demonstrations"
"""What the tiny model is warm-started on, unless told otherwise: an import path, so that no environment is imported."""
TINY = "tiny"


def demonstrations_of(model: str) -> str | None:
    """What the tiny model of a config is warm-started on; None when `model` names another model.

    >>> demonstrations_of("tiny:my.module:function"), demonstrations_of("org/name")
    ('my.module:function', None)
    """
    name, colon, path = model.partition(":")
    if name != TINY:
        return None
    return path if colon else DEMONSTRATIONS
