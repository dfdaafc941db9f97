"""The records that travel between the parts of areal_agent, and what is said to an engine and by it.

Every record is frozen, keyword-only and holds plain data: no live handles. Log-probabilities are in nats, times in
seconds since the epoch unless a name says otherwise, token positions count from 0.

How they nest::

    TrajectoryGroup ── Trajectory ── Turn ── Completion ── VersionSpan ── WeightVersion
                           └─▶ TokenRecord (what the trainer reads: one a branch)
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from math import fsum
from typing import Any, Self, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

JsonObject = Mapping[str, Any]
"""A decoded JSON object: tasks, messages and request bodies consist of these."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make an internal record that is made anew for every turn: a frozen dataclass, as pyright sees to.

    Python does not: its check would cost more than half of making the record, which is 2% of a turn of the gateway.
    """
    return dataclass(kw_only=True, slots=True)(cls)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class WeightVersion:
    """The name of one set of weights: `step` counts published optimiser updates, `incarnation` counts restarts.

    >>> str(WeightVersion(incarnation=0, step=17))
    '0:17'
    """

    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `"0:17"`; raises ValueError for anything else."""
        incarnation, colon, step = text.partition(":")
        if not (colon and incarnation.isascii() and incarnation.isdigit() and step.isascii() and step.isdigit()):
            raise ValueError(f"weight version {text!r} is not of the form 'incarnation:step', for example '0:17'")
        return cls(incarnation=int(incarnation), step=int(step))


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of one completion were sampled under `version`.

    >>> VersionSpan.of_tokens([WeightVersion(step=7)] * 2)
    (VersionSpan(version=WeightVersion(incarnation=0, step=7), start=0, end=2),)
    """

    version: WeightVersion
    start: int
    end: int

    @classmethod
    def of_tokens(cls, versions: Iterable[WeightVersion]) -> "tuple[VersionSpan, ...]":
        """Return the spans of tokens of which each was sampled under its entry of `versions`."""
        spans: list[VersionSpan] = []
        end = 0
        for version, of_one in groupby(versions):
            start, end = end, end + len(list(of_one))
            spans.append(cls(version=version, start=start, end=end))
        return tuple(spans)


class FinishReason(StrEnum):
    """The reason for which a completion ended."""

    STOP = "stop"  # an end token was sampled, or a stop text was completed by the completion's last id
    LENGTH = "length"  # max_tokens was reached
    ABORT = "abort"  # aborted; the tokens sampled until then are kept


class Distribution(StrEnum):
    """States whether the recorded probability of a token is the one it was sampled with."""

    EXACT = "exact"
    ALTERED = "altered"  # top-p, top-k, greedy ...: the tokens are counted and masked from the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling settings of one completion. All defaults but those of `temperature` and `max_tokens` mean off.

    An answer ends with an end token, which stays its last id, or at `max_tokens`. The end tokens are `stop_token_ids`
    and those of the model: `eos_token_id` in its files. With `ignore_eos` the model's do not end it: they are sampled
    with their probability, stay among the ids, and the answer goes on. Of the first `min_tokens` tokens none is an end
    token, of either kind and whatever `ignore_eos` says: they are masked, and log-probabilities are those of the
    masked distribution.

    >>> SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True).distribution
    <Distribution.EXACT: 'exact'>
    >>> SamplingParams(min_tokens=1).distribution
    <Distribution.ALTERED: 'altered'>
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, the number added to its logit)
    json_schema: str | None = None  # a JSON schema, as text, that the answer must match; at most one of these three
    regex: str | None = None  # a regular expression that the whole answer must match
    ebnf: str | None = None  # a grammar whose `root` the answer must be, in GBNF: root ::= "yes" | "no"
    max_tokens: int = 256
    min_tokens: int = 0  # at most max_tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # texts that end the answer. The gateway cuts there; no engine sees them
    seed: int | None = None  # None: the engine chooses

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The name and the text of the parameter that constrains the answer, or None."""
        given = (("json_schema", self.json_schema), ("regex", self.regex), ("ebnf", self.ebnf))
        return next(((name, text) for name, text in given if text is not None), None)

    @property
    def distribution(self) -> Distribution:
        """`exact` when temperature is the only knob in use that changes probabilities."""
        only_temperature = (
            self.temperature > 0.0
            and self.top_p >= 1.0
            and self.top_k in (-1, 0)
            and self.min_p <= 0.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not any(bias for _, bias in self.logit_bias)
            and self.grammar is None
            and self.min_tokens <= 0
        )
        return Distribution.EXACT if only_temperature else Distribution.ALTERED


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled answer, as the engine produced it.

    >>> span = VersionSpan(version=WeightVersion(step=7), start=0, end=2)
    >>> Completion(id="c1", token_ids=(5, 6), logprobs=(-0.1, -0.2), versions=(span,),
    ...            finish_reason=FinishReason.STOP, distribution=Distribution.EXACT).version_steps()
    (7, 7)
    """

    id: str
    token_ids: tuple[int, ...]  # [C]
    logprobs: tuple[float, ...]  # [C], nats, after temperature
    versions: tuple[VersionSpan, ...]  # cover [0, C) without gap or overlap
    finish_reason: FinishReason
    distribution: Distribution

    def version_steps(self) -> tuple[int, ...]:
        """The optimiser step of the weights that sampled each token, [C]."""
        return tuple(span.version.step for span in self.versions for _ in range(span.start, span.end))

    def version_incarnations(self) -> tuple[int, ...]:
        """The incarnation of the weights that sampled each token, [C]."""
        return tuple(span.version.incarnation for span in self.versions for _ in range(span.start, span.end))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpan:
    """Tokens `[start, end)` of a sequence stand for an image: all have the id that the model has for that.

    What stands around them, such as the marks of its beginning and its end, is outside. `digest` is the SHA-256 of the
    image's bytes, hexadecimal, under which `images.ImageFolder` has them.
    """

    digest: str
    start: int
    end: int

    def after(self, num_tokens: int) -> "ImageSpan":
        """Return the span with so many tokens before its sequence."""
        return ImageSpan(digest=self.digest, start=num_tokens + self.start, end=num_tokens + self.end)


class ForkReason(StrEnum):
    """The reason for which a turn did not continue the newest completion of its session."""

    NEW_CONVERSATION = "new_conversation"  # nothing recorded is a prefix of it: a sub-agent, or a compacted context
    EDITED = "edited"  # it continues an older prompt or completion: what followed that was rewritten
    REPEATED = "repeated"  # the same messages and tools again: a parallel sample, or a retry
    TOOLS_CHANGED = "tools_changed"  # the same messages under other tool definitions or template options
    SYSTEM_CHANGED = "system_changed"  # the same messages under another system prompt
    TEMPLATE_STRIPS_THINKING = "template_strips_thinking"  # the template leaves out the thinking of earlier answers
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"  # the old text is no prefix of the new rendering


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request of an agent and its answers. Only the *new* prompt tokens are held: the rest is the parent's path.

    The full prompt of the turn is the first `fork_at` tokens of the path that ends with completion `parent`, followed
    by `new_prompt_ids`. Where that cuts the parent's completion (because its thinking was stripped, say), those of its
    tokens that come again in `new_prompt_ids` are prompt there: they are in the loss in the parent's branch only.
    """

    id: str
    parent: str | None  # the completion that this turn continues; None: a new root
    fork_at: int  # number of tokens of the parent's path (prompt and completion) that this turn keeps
    new_prompt_ids: tuple[int, ...]  # [P']
    completions: tuple[Completion, ...]  # [n]
    request_delta: tuple[JsonObject, ...]  # the messages that the parent's conversation did not have
    sampling: SamplingParams
    started_s: float
    ended_s: float
    fork_reason: ForkReason | None = None
    images: tuple[ImageSpan, ...] = ()  # in `new_prompt_ids`, in their order

    def images_of_prompt(self, path: Iterable[ImageSpan]) -> tuple[ImageSpan, ...]:
        """The images of the full prompt, given those of the parent's path."""
        kept = (one for one in path if one.end <= self.fork_at)
        return (*kept, *(one.after(self.fork_at) for one in self.images))


class SessionPurpose(StrEnum):
    """The use of a session's tokens: training or evaluation."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """The start of a session, as the ledger keeps it. `key_hash` is the SHA-256 of its API key, hexadecimal."""

    id: str
    group_id: str
    task_id: str
    purpose: SessionPurpose
    seed: int
    key_hash: str
    started_s: float


ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""The name of a role. It is no number, for tasks, and groups named after them, end with those: `HumanEval/0`."""


def role_of(session_id: str, group_id: str) -> str:
    """Return the role of a session: SESSION/ROLE of the group GROUP/ROLE is another role of a rollout. Else empty.

    >>> role_of("g7-0/black", "g7/black"), role_of("g7-0", "g7"), role_of("first/0", "HumanEval/0")
    ('black', '', '')
    """
    _, slash, role = group_id.rpartition("/")
    is_role = slash and session_id != group_id and session_id.endswith(f"/{role}") and ROLE.fullmatch(role)
    return role if is_role else ""


class Status(StrEnum):
    """The way a rollout ended."""

    COMPLETED = "completed"
    MISSING_REWARD = "missing_reward"  # it ended without a reward: missing, never 0.0
    REJECTED = "rejected"  # the workflow said so (rollout.reject, Reject)
    INFRA = "infra"  # sandbox or engine failed: not the model's fault
    ERROR = "error"  # the workflow raised, returned no finite reward, or never called the model
    TIMEOUT = "timeout"  # it ran longer than rollout.timeout_s
    CANCELLED = "cancelled"  # the run ended first
    ORPHAN = "orphan"  # its process died


class Drop(StrEnum):
    """The reason for which a trajectory was not trained."""

    STALE = "stale"
    FILTERED = "filtered"
    ALTERED = "altered"  # none of its tokens has the probability that it was sampled with
    REJECTED = "rejected"
    MISSING_REWARD = "missing_reward"
    INFRA = "infra"
    ERROR = "error"
    ORPHAN = "orphan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """The one end of a trajectory: trained in a committed step, or dropped for a reason.

    >>> str(Fate(trained_step=3)), str(Fate(dropped=Drop.STALE))
    ('trained(3)', 'dropped(stale)')
    """

    trained_step: int | None = None
    dropped: Drop | None = None

    def __post_init__(self) -> None:
        if (self.trained_step is None) == (self.dropped is None):
            raise ValueError("a fate is either trained_step or dropped, exactly one")

    def __str__(self) -> str:
        return f"dropped({self.dropped})" if self.dropped else f"trained({self.trained_step})"


MAX_REWARD = 1e30
"""The largest absolute reward: the trainer adds rewards up as 32-bit floats, whose sums must stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """The rewards of a rollout. `final` is None when no final reward was given.

    >>> Rewards(final=1.0, by_completion={"c1": 0.5}).total
    1.5
    >>> Rewards(by_completion={str(number): 0.1 for number in range(10)}).total
    1.0
    """

    final: float | None = None
    by_completion: Mapping[str, float] = field(default_factory=dict[str, float])
    parts: Mapping[str, float] = field(default_factory=dict[str, float])  # named; not in the total

    @property
    def is_missing(self) -> bool:
        return self.final is None and not self.by_completion

    @property
    def total(self) -> float:
        """Final reward plus all rewards by completion; 0.0 when missing (check `is_missing` first)."""
        return fsum((self.final or 0.0, *self.by_completion.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A closed session: everything that was sampled in it, what it earned, and how it ended."""

    session_id: str
    group_id: str
    task_id: str
    turns: tuple[Turn, ...]
    rewards: Rewards
    status: Status
    error: str | None
    logged: JsonObject  # what the workflow passed to rollout.log
    started_s: float
    ended_s: float
    fate: Fate | None = None
    undelivered: tuple[str, ...] = ()  # completions whose answer never reached the agent: orphans, masked from the loss

    @property
    def role(self) -> str:
        """The role in its rollout; empty for the rollout's own session."""
        return role_of(self.session_id, self.group_id)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(completion.token_ids) for turn in self.turns for completion in turn.completions)

    def sampled_versions(self) -> frozenset[WeightVersion]:
        """The distinct weights that sampled tokens of this trajectory."""
        return frozenset(
            span.version
            for turn in self.turns
            for completion in turn.completions
            for span in completion.versions
            if span.end > span.start
        )

    def sampled_steps(self) -> frozenset[int]:
        """The distinct `WeightVersion.step`s that sampled tokens of this trajectory."""
        return frozenset(version.step for version in self.sampled_versions())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """The sibling rollouts of one task: the unit of admission, and for each role that of the baseline."""

    group_id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]  # [G], failed ones included, and those of other roles


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRecord:
    """One branch of a trajectory as the trainer sees it, T tokens in K turns.

    A token that several branches share is in the loss of exactly one of them. `behavior_logprobs`, `temperatures`,
    `versions` and `incarnations` are 0.0, 1.0, -1 and -1 where `loss_mask` is False. Without `incarnations` every token
    is of incarnation 0. A turn is `truncated` if its whole answer is in the branch, and ended by its token limit
    (finish reason `length`).
    """

    session_id: str
    group_id: str
    branch: int
    parent_branch: int | None  # the branch that this one forked from
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T], True: sampled, exact, and trained in this branch
    turn_index: NDArray[np.int32]  # [T], in 0..K-1
    behavior_logprobs: NDArray[np.float32]  # [T], nats
    temperatures: NDArray[np.float32]  # [T]
    versions: NDArray[np.int32]  # [T], WeightVersion.step
    turn_rewards: NDArray[np.float32]  # [K], the last turn's includes the final reward
    final_reward: float = 0.0  # the share of the last turn's reward that is the final reward
    fork_turn: int | None = None  # the turn of the parent branch that this one leaves
    own_turn: int = 0  # the first turn with a token that no earlier branch has
    sample_of: int | None = None  # this one's first own turn is a parallel sample of a call in that branch
    incarnations: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # [T], of `versions`
    truncated: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))  # [K], cut off by its limit
    images: tuple[ImageSpan, ...] = ()  # in `token_ids`, in their order

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if not len(self.truncated):
            object.__setattr__(self, "truncated", np.zeros(len(self.turn_rewards), dtype=np.bool_))
        if not len(self.incarnations):
            object.__setattr__(self, "incarnations", np.zeros(num_tokens, dtype=np.int32))
        for name in ("loss_mask", "turn_index", "behavior_logprobs", "temperatures", "versions", "incarnations"):
            if len(getattr(self, name)) != num_tokens:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {num_tokens} tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Whole groups, leased for the train step that turns weight version `step - 1` into `step`; the first is 1."""

    step: int
    groups: tuple[TrajectoryGroup, ...]
    records: tuple[TokenRecord, ...]

    @property
    def trained(self) -> tuple[Trajectory, ...]:
        """The trajectories that have a record in this batch."""
        ids = {record.session_id for record in self.records}
        return tuple(t for group in self.groups for t in group.trajectories if t.session_id in ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task to roll out. `data` is the dict that the workflow receives; `id` names the task in every record."""

    id: str
    data: JsonObject
    metadata: JsonObject = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptImage:
    """An image of a prompt: where its tokens stand, and its bytes, a file of PNG, JPEG or WebP."""

    span: ImageSpan
    data: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One call of an engine, tokens in. `request_id`s of one run have equal length (SGLang aborts by prefix)."""

    request_id: str
    input_ids: Sequence[int]  # a tuple; `array("i")` for a long prompt, which takes a quarter of the work
    sampling: SamplingParams
    num_top_logprobs: int = 0  # number of the likeliest tokens to report at each position
    images: tuple[PromptImage, ...] = ()  # in `input_ids`, in their order


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position, likeliest first: (token id, log-probability in nats)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Tokens of one request as they leave the engine, without those of earlier chunks. All chunks make the result."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()  # one per token, or empty when none were asked for
    versions: tuple[VersionSpan, ...] = ()  # positions count from this chunk's first token; empty: not known yet

    def first(self, num_tokens: int) -> "TokenChunk":
        """Return its first tokens."""
        return TokenChunk(
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            top_logprobs=self.top_logprobs[:num_tokens],
            versions=VersionSpan.of_tokens(self.version_of_each()[:num_tokens]),
        )

    def version_of_each(self) -> list[WeightVersion]:
        """The version that sampled each token; empty: not known yet."""
        return [span.version for span in self.versions for _ in range(span.start, span.end)]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """The C tokens an engine sampled, the log-probability of each (after temperature) and their version spans."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()  # one per token, or empty when none were asked for


class PauseMode(StrEnum):
    """The treatment of requests in flight during a pause; SGLang's names."""

    ABORT = "abort"  # they return what they have
    RETRACT = "retract"  # they stop at a token boundary; after resume their KV cache is recomputed
    IN_PLACE = "in_place"  # they freeze, and go on with the old KV cache
    WAIT = "wait"  # they end first, and those that have sampled nothing wait; vLLM's name, SGLang has no such mode


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """The place of one tensor in a weight file. `dtype` is torch's name without the module: `float32`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryWeights:
    """A set of weights in a memory-mapped file of this host. `crc32` is over the bytes of `entries` in their order."""

    path: str
    entries: tuple[TensorEntry, ...]
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskWeights:
    """A set of weights as a Hugging Face folder (config.json and safetensors)."""

    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """The part of a set of weights that one rank of the trainer sends."""

    host: str  # of the rank's store
    port: int
    name: str  # of this part; who asks for it has to know it
    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedWeights:
    """A set of weights that the trainer's ranks send to every engine that asks at their stores (torch.distributed).

    The bytes of the parts, one after the other, are the set; the offsets of `entries` count from their start, and a
    tensor may lie in several parts. Each part is sent in pieces of `bucket_bytes`.
    """

    parts: tuple[WeightPart, ...]
    entries: tuple[TensorEntry, ...]
    bucket_bytes: int
    timeout_s: float  # the longest wait of either side for the other's next step

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWeights:
    """A set of weights in the memory of the trainer's GPU, which an engine on the same GPU opens by the `handle`.

    `checksum` is over all its bytes, and `device` the UUID of the GPU; empty on a CPU.
    """

    handle: str
    device: str
    entries: tuple[TensorEntry, ...]
    checksum: int


Weights = SharedMemoryWeights | DiskWeights | DistributedWeights | DeviceWeights
"""Every form in which a push can send weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """An engine's description of itself (`/server_info`, `/model_info`)."""

    model_path: str
    weight_version: WeightVersion
    vocab_size: int
    max_context_tokens: int
    has_grammar: bool = False  # it honours SamplingParams.json_schema, regex and ebnf
