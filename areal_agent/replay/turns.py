"""Recorded turns as tasks of a new run: training goes on from the middle of episodes.

::

    workflow: areal_agent.replay:go_on
    tasks:
      source: areal_agent.replay:turns
      args: {run: runs/code, turn: 1}

A rollout plays the recorded turns again, behind a gateway of its own, so that sandboxes and the workflow's state are
what they were; then its calls go to the run's gateway as tokens. So the recorded answers are prompt, token by token,
and only fresh ones are trained.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson

from areal_agent.errors import ConfigError, EngineError, EngineUnreachable, Reject, RequestError
from areal_agent.gateway.answers import request_id_of
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot, ledger_in, reading
from areal_agent.replay.saved import Episode, SavedRun
from areal_agent.replay.stage import Play, Stage, open_stage
from areal_agent.rollout.context import Rollout
from areal_agent.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    SamplingParams,
    SessionPurpose,
    Status,
    Task,
    TokenChunk,
    VersionSpan,
    WeightVersion,
)

PLACE = "replay"
"""The key of a task's data with its run, and with the session and the turn from which it goes on."""

COMPACTION = "compaction"


def turns(
    split: str,
    seed: int,
    run: str,
    *,
    turn: int | Literal["compaction"] | None = None,
    append: str | None = None,
    sessions: Sequence[str] | None = None,
    below: float | None = None,
    step: int | None = None,
) -> Iterator[Task]:
    """Yield a task for each recorded session of `run` that failed: one that completed with a reward below `below`.

    `below` is the run's `eval.success_reward` unless given; `step` takes only groups of that train step, `sessions`
    exactly these. The first `turn` answers are kept, a negative number counts from the last one, and `compaction` keeps
    those before the first new conversation; by default all but the last. With `append` all are kept, and a message of
    the user with this text follows. Sessions without such a turn are left out. The split `test` is the run's own.
    """
    saved = SavedRun.open(Path(run))
    if split == "test":
        place = {PLACE: {"run": str(saved.folder.path.absolute())}}
        yield from (Task(id=one.id, data={**one.data, **place}) for one in saved.tasks_held_out.values())
        return
    limit = saved.config.eval.success_reward if below is None else below
    with reading(ledger_in(Path(run))) as snapshot:
        for session_id in _failed(saved, snapshot, limit, step) if sessions is None else sessions:
            task = _task(saved, saved.episode(snapshot, session_id), turn, append)
            if task is not None:
                yield task


def _failed(run: SavedRun, snapshot: Snapshot, limit: float, step: int | None) -> Sequence[str]:
    groups = questions.group_ids(snapshot, SessionPurpose.TRAIN, step=step)
    every = [one for ones in questions.rollouts_of(snapshot, groups).values() for one in ones]
    failed = [one for one in every if one.status == Status.COMPLETED and one.rewards.total < limit]
    has_roles = partial(run.has_roles, snapshot)
    return sorted(one.session_id for one in failed if one.num_turns and not has_roles(one.session_id, one.group_id))


def _task(run: SavedRun, episode: Episode, turn: int | str | None, append: str | None) -> Task | None:
    """Return the task that goes on from a turn; None if the session has no such turn."""
    last = len(episode.turns)
    match turn:
        case None:
            kept = last - (append is None)
        case str():
            if turn != COMPACTION:
                raise ConfigError(f"turn is {turn!r}; give a number, or {COMPACTION!r}")
            roots = [index for index, one in enumerate(episode.turns) if one.parent is None]
            kept = roots[1] if len(roots) > 1 else 0
        case int():
            kept = turn if turn >= 0 else last + turn
    has_more = append is not None or episode.trajectory is None or episode.trajectory.status is not Status.COMPLETED
    if not 0 < kept < last + has_more:  # after the last turn of a whole episode there is no call
        return None
    if any(one.images for one in episode.turns):
        raise ConfigError(
            f"session {episode.session.id!r} has images: training from the middle goes on in tokens alone; choose "
            "`sessions` without images"
        )
    task, session_id = run.task(episode.session), episode.session.id
    data = {**task.data, PLACE: {"run": str(run.folder.path.absolute()), "session": session_id, "turn": kept}}
    if append is not None:
        messages = _conversation(run, episode, kept, task)
        if messages is None:
            return None
        data |= {"messages": [*messages, {"role": "user", "content": append}], PLACE: {**data[PLACE], "turn": None}}
    return Task(id=f"{session_id}@{kept}", data=data)


def _conversation(run: SavedRun, episode: Episode, kept: int, task: Task) -> Sequence[JsonObject] | None:
    """Return the messages up to a turn's answer and its tools' results; None where those were not recorded."""
    turn, whole = episode.turns[kept - 1], run.transcript.conversations(episode.turns)
    own = task.data.get("messages")
    if not isinstance(own, list) or list(whole(turn))[: len(own)] != own:
        raise ConfigError(
            f"append: session {episode.session.id!r} does not begin with the `messages` of its task, so its workflow "
            "cannot be given a longer conversation; leave append out, or begin with task['messages'] in the workflow"
        )
    answer = turn.completions[0]
    following = next((one for one in episode.turns[kept:] if one.parent == answer.id), None)
    if following is not None and all(message.get("role") == "tool" for message in following.request_delta):
        return whole(following)
    message = run.transcript.message(turn, answer)
    return None if message.get("tool_calls") else [*whole(turn), message]


# --------------------------------------------------------------------------------------------------- the workflow


async def go_on(task: dict[str, Any], rollout: Rollout) -> object:
    """Run the workflow of the recorded run on a task of `turns`: recorded answers first, fresh ones after its turn.

    Raises Reject when the turn cannot be reached, since a call before it was not as recorded.
    """
    place, data = task[PLACE], {name: value for name, value in task.items() if name != PLACE}
    stage = await rollout.shared(_StageOf(place["run"]))
    if place.get("turn") is None:
        return await stage.run.workflow(data, rollout)
    episode = await asyncio.to_thread(_read, stage.run, place["session"])
    engine = _RunsGateway(rollout, stage.run)
    original = Task(id=episode.session.task_id, data=data)
    play = Play(episode=episode, upto=place["turn"], then=engine, seed=rollout.seed, task=original)
    played = await stage.play(play)
    if not played.num_fresh and not played.is_as_recorded:
        why = str(played.differences[0]) if played.differences else str(played.trajectory.error)
        raise Reject(f"turn {place['turn']} of session {episode.session.id} was not reached: {why}")
    ended = played.trajectory
    if ended.status is Status.REJECTED:
        raise Reject(str(ended.error))
    if ended.status is Status.INFRA:
        raise EngineError(str(ended.error))
    if ended.status is not Status.COMPLETED and ended.status is not Status.MISSING_REWARD:
        raise RuntimeError(str(ended.error))
    rollout.log(**ended.logged)
    for name, value in played.rewards.parts.items():
        rollout.reward(value, name=name)
    for name, value in played.trajectory.rewards.by_completion.items():
        if (fresh := engine.answer_ids.get(request_id_of(name))) is not None:
            rollout.reward(value, completion=fresh)
    return played.rewards.final


@dataclass(frozen=True)
class _StageOf:
    """Opens the stage of a run; equal ones are one shared resource."""

    run_dir: str

    def __call__(self, rollout: Rollout) -> AbstractAsyncContextManager[Stage]:
        return self._open(rollout)

    @asynccontextmanager
    async def _open(self, rollout: Rollout) -> AsyncGenerator[Stage]:
        run = await asyncio.to_thread(SavedRun.open, Path(self.run_dir))
        limit_s = 1e9  # the run's own limit counts
        async with open_stage(run, timeout_s=limit_s, sandbox=rollout.sandbox, bridges_tools=True) as stage:
            yield stage


def _read(run: SavedRun, session_id: str) -> Episode:
    with reading(run.folder.ledger) as snapshot:
        return run.episode(snapshot, session_id)


class _RunsGateway:
    """A `protocols.Sampler` that asks the gateway of the new run, in tokens, so that the new run records them."""

    def __init__(self, rollout: Rollout, run: SavedRun) -> None:
        self.answer_ids: dict[str, str] = {}  # by request id: the completion in the new run's ledger
        self._rollout = rollout
        rollout_config = run.config.rollout
        self._usual = SamplingParams(temperature=rollout_config.temperature, max_tokens=rollout_config.max_tokens)

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        if request.images:
            raise RequestError("training from the middle goes on in tokens alone; this call has images", code="images")
        body: JsonObject = {
            "model": self._rollout.model,
            "prompt": list(request.input_ids),
            "return_token_ids": True,
            "logprobs": 0,
            **self._asked(request.sampling),
        }
        reply = await self._rollout.http_client.post(
            f"{self._rollout.base_url}/completions",
            content=orjson.dumps(body),
            headers={"Authorization": f"Bearer {self._rollout.api_key}", "Content-Type": "application/json"},
        )
        answer = orjson.loads(reply.content)
        if reply.status_code != 200:
            raise EngineUnreachable(f"the run's gateway answered {reply.status_code}: {answer}")
        choice = answer["choices"][0]
        self.answer_ids[request.request_id] = answer["id"]
        token_ids, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        spans = (VersionSpan(version=WeightVersion(), start=0, end=len(token_ids)),)  # the new run's ledger knows
        if on_chunk is not None and token_ids:
            on_chunk(TokenChunk(token_ids=token_ids, logprobs=logprobs, versions=spans))
        reason = FinishReason(choice["finish_reason"])
        return GenerateResult(token_ids=token_ids, logprobs=logprobs, versions=spans, finish_reason=reason)

    async def abort(self, request_id: str) -> None:
        """Do nothing: a call that is cancelled hangs up, which ends it."""

    def _asked(self, sampling: SamplingParams) -> JsonObject:
        """Return what the workflow asked for; what it left out is up to the new run."""
        usual = asdict(self._usual)
        ours = {"seed", "stop_token_ids", "json_schema", "regex", "ebnf"}
        asked = {name: value for name, value in asdict(sampling).items() if value != usual[name] and name not in ours}
        if "logit_bias" in asked:
            asked["logit_bias"] = {str(token_id): bias for token_id, bias in asked["logit_bias"]}
        return asked
