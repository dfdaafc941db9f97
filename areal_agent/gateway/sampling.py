"""How a request wants to be sampled: what the body says, over what its session says, over the defaults."""

from dataclasses import dataclass
from typing import Self

from areal_agent.gateway.fields import as_bounded_number, as_integer, refuse
from areal_agent.types import JsonObject, SamplingParams

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1

WISH_FIELDS = frozenset({"temperature", "top_p", "top_k", "max_tokens"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingWishes:
    """Sampling parameters as far as someone asked for them; None: not asked for.

    >>> SamplingWishes(temperature=0.5).over(SamplingWishes(temperature=1.0, max_tokens=8))
    SamplingWishes(temperature=0.5, top_p=None, top_k=None, max_tokens=8)
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None

    @classmethod
    def read(cls, body: JsonObject, where: str = "") -> Self:
        """Take them from a body; raises RequestError naming the one that is wrong."""
        temperature, top_p, top_k = body.get("temperature"), body.get("top_p"), body.get("top_k")
        if top_p is not None and as_bounded_number(top_p, where + "top_p", low=0, high=1) == 0:
            refuse(where + "top_p", top_p, "greater than 0")
        return cls(
            temperature=None
            if temperature is None
            else as_bounded_number(temperature, where + "temperature", low=0, high=2),
            top_p=None if top_p is None else float(top_p),
            top_k=None if top_k is None else as_integer(top_k, where + "top_k", low=-1, high=MAX_TOKENS) or -1,
            max_tokens=_read_max_tokens(body, where),
        )

    def over(self, defaults: "SamplingWishes") -> "SamplingWishes":
        """These, and the defaults where these say nothing."""
        return SamplingWishes(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            max_tokens=defaults.max_tokens if self.max_tokens is None else self.max_tokens,
        )

    def params(self, *, num_room: int, stop_token_ids: tuple[int, ...], seed: int) -> SamplingParams:
        """What the engine is asked for: at most the `num_room` tokens that the context has left."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            max_tokens=num_room if self.max_tokens is None else min(self.max_tokens, num_room),
            stop_token_ids=stop_token_ids,
            seed=seed,
        )


def _read_max_tokens(body: JsonObject, where: str) -> int | None:
    limits = {
        name: as_integer(body[name], where + name, low=1, high=MAX_TOKENS)
        for name in ("max_completion_tokens", "max_tokens")
        if body.get(name) is not None
    }
    if len(set(limits.values())) > 1:
        refuse(where + "max_tokens", limits["max_tokens"], f"max_completion_tokens ({limits['max_completion_tokens']})")
    return next(iter(limits.values()), None)
