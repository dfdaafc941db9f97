"""The config sections of rollouts: how they run, and how they are evaluated. (Their tasks: tasks/config.py.)"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_agent.rollout.tasks.config import TasksConfig
from areal_agent.section import Section
from areal_agent.tokens.formats.answer_format import ReasoningFormat, ToolFormat
from areal_agent.tokens.template import HistoryThinking


class RolloutConfig(Section):
    """How rollouts run."""

    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that run workflows, each with a gateway of its own; 0: all in the main process. Client and gateway
    together fill a core at some 250 turns a second."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Rollouts at once, over all workers."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """A rollout that runs longer is cancelled with its requests and sandboxes, and recorded as `timeout`."""
    straggler_wait_s: Annotated[float, Field(ge=0)] = 120.0
    """With `straggler: wait`: how long a batch waits for a group that would be too stale for the next one."""
    max_failed_groups: Annotated[int, Field(ge=1)] = 8
    """The run ends when this many groups in a row have failed as a whole."""
    max_flat_groups: Annotated[int, Field(ge=1)] = 256
    """With `algorithm.dynamic_sampling`: the run ends when this many groups in a row have had no spread in reward."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Sampling temperature of requests that name none."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens a request that names no `max_tokens` may generate."""
    train_altered: bool = False
    """Train also tokens whose recorded probability is not the one that they were sampled with: top-p, top-k, min-p,
    penalties, biases, a grammar. Their importance weights are then wrong by what was cut off."""
    block_warn_s: Annotated[float, Field(gt=0)] = 1.0
    """A workflow that blocks the event loop for so long is named in a warning."""
    history_thinking: HistoryThinking = HistoryThinking.TEMPLATE
    """The thinking of earlier answers, where the chat template would strip it: `template` lets it, at the price of a
    branch a turn; `keep` leaves it in the prompt, and exports a chat template that does so with every checkpoint."""
    tool_format: ToolFormat | None = None
    """How the model writes tool calls; by default as its chat template does."""
    reasoning_format: ReasoningFormat | None = None
    """How the model marks its reasoning; by default as its chat template does."""
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the gateway on 127.0.0.1; 0 picks a free one. With workers, that of the first; the others follow."""
    gateway_url: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = None
    """A gateway that stands alone (`python -m areal_agent.gateway`): batches are leased from it and the agents are
    elsewhere, so that there is no workflow and no tasks. Needs `engine.url`."""
    gateway_admin_key_file: str | None = None
    """The file with that gateway's admin key; by default it is read from `AREAL_AGENT_ADMIN_KEY`."""

    @model_validator(mode="after")
    def _every_worker_has_a_slot(self) -> Self:
        if self.workers > self.max_concurrent:
            raise ValueError(
                f"workers is {self.workers} and max_concurrent {self.max_concurrent}; each needs a rollout to run"
            )
        if self.gateway_ports[-1] > 65535:
            raise ValueError(
                f"gateway_port is {self.gateway_port}; with {self.workers} workers it leaves too few ports"
            )
        return self

    @property
    def gateway_ports(self) -> tuple[int, ...]:
        """One a gateway: of each worker, or of the main process."""
        num_gateways = max(1, self.workers)
        return tuple(self.gateway_port + index if self.gateway_port else 0 for index in range(num_gateways))

    @property
    def slots(self) -> tuple[int, ...]:
        """`max_concurrent` divided, one number a gateway.

        >>> RolloutConfig(workers=3, max_concurrent=8).slots
        (3, 3, 2)
        """
        num_gateways = max(1, self.workers)
        each, rest = divmod(self.max_concurrent, num_gateways)
        return tuple(each + (index < rest) for index in range(num_gateways))


class SandboxConfig(Section):
    """The settings that a workflow finds in `rollout.sandbox`, for `sandboxes.open_pool(**rollout.sandbox)`."""

    backend: Literal["auto", "embedded", "docker", "bubblewrap", "namespaces", "subprocess"] = "embedded"
    """`docker` runs containers, `bubblewrap` and `namespaces` are jails, `subprocess` limits time, memory and output
    and does not isolate (see sandboxes/README.md). `auto` takes the strongest that works on this machine, `embedded`
    a jail."""
    min_isolation: Literal["none", "process", "namespaces", "container", "vm"] | None = None
    """Sandboxes that would isolate less are an error. `none` and `process` let `auto` and `embedded` fall back on
    `subprocess`, with a warning, where no isolation works; null does not."""
    wall_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds that one program may run."""
    memory_bytes: Annotated[int, Field(ge=16 * 2**20)] = 256 * 2**20
    """Address space of one program."""
    output_bytes: Annotated[int, Field(ge=1)] = 64 * 2**10
    """Bytes that one program may print."""
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Programs at once."""


class EvalConfig(Section):
    """The evaluation before and after training: the same tasks, seeds and sampling."""

    num_tasks: Annotated[int, Field(ge=0)] = 200
    """How many held-out tasks; 0 skips evaluation."""
    tasks: TasksConfig | None = None
    """Defaults to the training sources with split `test`; a file, or a split that was named, needs one of its own."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate also after every so many steps, beside training, in a quarter of `rollout.max_concurrent` at most;
    0: only before and after. Pushes go on meanwhile: its row in metrics.jsonl counts the answers of each weight
    version. A due evaluation is left out while the one before it is under way; a run that completes waits for the last
    one, one that is interrupted cancels it. A resume makes up for the last one due where it has no result."""
    success_reward: float = 1.0
    """A rollout whose total reward is at least this is a success."""

    @model_validator(mode="after")
    def _every_needs_tasks(self) -> Self:
        if self.every and not self.num_tasks:
            raise ValueError(f"every is {self.every} and num_tasks 0: there is nothing to evaluate; give num_tasks")
        return self

    @field_validator("tasks", mode="before")
    @classmethod
    def _source_alone(cls, value: object) -> object:
        return {"source": value} if isinstance(value, str) else value
