"""What an engine has done since it started."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Counts:
    """Sums; the model thread adds to them and others read."""

    busy_s: float = 0.0  # in which a step was running
    requests: int = 0
    aborted_requests: int = 0
    retracted_requests: int = 0  # for want of room
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the prefix cache
    generated_tokens: int = 0
