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
    """Requests that sample at once; further ones queue. Each reserves KV cache for `max_context_tokens`."""
    max_context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    """Prompt and completion of one request together."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the engine may take to load the model and answer."""
