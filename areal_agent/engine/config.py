"""The config section of the inference engine."""

from typing import Annotated, Literal

from pydantic import Field

from areal_agent.section import Section


class EngineConfig(Section):
    """How tokens are sampled. Derived from the rest of the config: the model, the seed and the weight version."""

    backend: Literal["embedded"] = "embedded"
    """`embedded`: the engine that comes with areal_agent, in a process of its own."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = None
    """An engine that runs already, on this machine: with `rollout.gateway_url`, the engine behind that gateway."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the engine on 127.0.0.1; 0 picks a free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of the engine process. Engine and trainer together should not exceed the cores of the machine."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests that sample at once; further ones queue."""
    max_context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    """Prompt and completion of one request together."""
    kv_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens whose keys and values are kept, of running requests and of those that may be continued. Default: what fits
    into a quarter of the machine's memory (a GPU: half of what is free), at most two contexts a running request."""
    on_push: Literal["interrupt", "turn_boundary", "drain"] = "interrupt"
    """What new weights do to answers under way. `interrupt`: they stop at a token and go on under the new weights.
    `turn_boundary`: they end under the old ones first, and the next turns wait. `drain`: whole rollouts end first."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the engine may take to load the model and answer."""
