"""What all sessions of a gateway share."""

from dataclasses import dataclass, field
from random import Random

from areal_agent.gateway.stats import Counters
from areal_agent.protocols import Journal, Sampler
from areal_agent.tokens.renderer import Renderer

ABORT_GRACE_S = 5.0
"""How long an engine may take to answer an abort before its request is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """The parts around the sessions, and what the engine can do."""

    sampler: Sampler
    renderer: Renderer
    journal: Journal
    counters: Counters
    max_context_tokens: int
    vocab_size: int  # of the model: its tokenizer may know fewer ids
    has_grammar: bool = False  # the engine can hold answers to a JSON schema
    abort_grace_s: float = ABORT_GRACE_S
    numbers: Random = field(default_factory=Random)  # for ids; whoever seeds Python's own does not repeat them
