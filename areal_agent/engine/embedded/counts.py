"""What an engine has done since it started."""

from dataclasses import dataclass, field

from areal_agent.engine.embedded.latency import Latency


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
    to_first_token: Latency = field(default_factory=Latency)  # from the arrival of a request
    to_answer: Latency = field(default_factory=Latency)  # of those that nobody aborted
