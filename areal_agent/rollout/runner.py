"""One rollout from its session's start to its end, over the gateway's HTTP.

    start_session ─▶ workflow(task, rollout) ─▶ set_reward* ─▶ end_session
                         └─ rollout.role(name): start_session      of each role, and then of the rollout

Whatever a workflow does ends as a status: a failed rollout is data, and its siblings go on. All rollouts of a process
share their HTTP clients, for a connection pool per rollout would cost more than its turns. The clients ignore the
environment's proxies: a gateway is on this machine.
"""

import asyncio
import contextlib
import hashlib
import logging
import ssl
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Self, cast

import aiohttp
import httpx
import openai
import orjson
from httpx_aiohttp import HttpxAiohttpClient

from areal_agent.errors import ArealAgentError, DiskFull, EngineError, Reject, SandboxError
from areal_agent.observe.clock import BusyClock
from areal_agent.process import uninterrupted
from areal_agent.rollout.context import Role, Rollout, SharedResources, as_reward
from areal_agent.rollout.models import NO_MODELS, OtherModels, RolloutClient
from areal_agent.rollout.watchdog import ROLLOUT_TASK
from areal_agent.rollout.workflow import Workflow
from areal_agent.section import last_line
from areal_agent.types import SessionPurpose, Status, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    """The HTTP clients of a process, from `open_clients`. They have no timeout: the runner limits a rollout's time."""

    control: aiohttp.ClientSession  # the runner's own, for `/rl/*`
    agents: httpx.AsyncClient  # under the `openai` client of a workflow
    threads: httpx.Client  # under the client of a workflow that runs in a thread


@asynccontextmanager
async def open_clients() -> AsyncGenerator[Clients]:
    """Open the clients; they are closed on leaving."""
    async with AsyncExitStack() as stack:
        limits, trust = httpx.Limits(max_connections=None), _certificates()
        options: dict[str, Any] = {"trust_env": False, "timeout": None, "limits": limits, "verify": trust}
        yield Clients(
            control=await stack.enter_async_context(aiohttp.ClientSession()),
            # httpx's own pool costs 10 ms of CPU per turn at 64 agents, aiohttp's 1.3 (benchmarks/agent_client)
            agents=await stack.enter_async_context(HttpxAiohttpClient(**options)),
            threads=stack.enter_context(httpx.Client(**options)),
        )


@cache
def _certificates() -> ssl.SSLContext:
    """Return what clients check servers by. Reading it takes 20 ms, each time."""
    return httpx.create_ssl_context(trust_env=False)


MAX_ERROR_CHARS = 2000
MAX_LOGGED_BYTES = 1_000_000  # of one logged value
MAX_ALL_LOGGED_BYTES = 8_000_000  # a gateway limits the size of a body

NO_KEY = "replaced-by-session"

SESSION_IS_OVER = (401, 409)
"""The gateway's status codes for a call on a session that has ended; it may have forgotten the key."""

INFRA = (SandboxError, EngineError, openai.InternalServerError, openai.APIConnectionError)
"""What a workflow raises when something else than the model has failed."""

CANCEL_GRACE_S = 5.0
"""The time that a cancelled workflow has to clean up before it is left behind."""


def rollout_seed(run_seed: int, *names: str) -> int:
    """Return a seed in [0, 2**63) that depends only on the run's seed and the names, not on the order of events."""
    text = "/".join((str(run_seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """One rollout to run: its identity, task, seed and purpose."""

    session_id: str
    group_id: str
    task: Task
    seed: int
    purpose: SessionPurpose
    benchmark: str | None = None  # which benchmark's workflow plays it; None: the run's own

    def of_role(self, name: str) -> Self:
        """Return the spec of another role's session, whose siblings are those of the same role (`types.role_of`)."""
        session_id, group_id = f"{self.session_id}/{name}", f"{self.group_id}/{name}"
        return replace(self, session_id=session_id, group_id=group_id, seed=rollout_seed(self.seed, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How tasks are played: by which workflow, for how long, with which session and sandbox."""

    workflow: Workflow
    timeout_s: float
    session: Mapping[str, Any]
    sandbox: Mapping[str, Any]


NO_BENCHMARKS: Mapping[str, Manner] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    status: Status
    error: str | None = None


CANCELLED = _Outcome(status=Status.CANCELLED, error="the run ended first")


class RolloutRunner:
    """Runs a workflow against one gateway, at most `max_concurrent` rollouts at once."""

    def __init__(
        self,
        workflow: Workflow,
        *,
        gateway_url: str,
        admin_key: str,
        model: str,
        clients: Clients,
        shared: SharedResources,
        max_concurrent: int,
        timeout_s: float,
        session: Mapping[str, Any],
        sandbox: Mapping[str, Any],
        models: OtherModels = NO_MODELS,
        unawaited: dict[str, str] | None = None,
        benchmarks: Mapping[str, Manner] = NO_BENCHMARKS,
    ) -> None:
        """`unawaited` has the places of calls that were not awaited, by the name of their task (unawaited.py)."""
        own = Manner(workflow=workflow, timeout_s=timeout_s, session=session, sandbox=sandbox)
        self._manners: Mapping[str | None, Manner] = {None: own, **benchmarks}
        self._gateway_url = gateway_url
        self._admin_key = admin_key
        self._model = model
        self._clients = clients
        self._client = RolloutClient(
            api_key=NO_KEY, base_url=f"{gateway_url}/v1", max_retries=0, http_client=clients.agents
        )
        self._client.others, self._client.logged = models, {}
        self._sync_client = openai.OpenAI(
            api_key=NO_KEY, base_url=f"{gateway_url}/v1", max_retries=0, http_client=clients.threads
        )
        _ = self._client.chat.completions, self._sync_client.chat.completions  # imports that would block a rollout
        self._shared = shared
        self._slots = asyncio.Semaphore(max_concurrent)
        self._models = models
        self._unawaited = {} if unawaited is None else unawaited
        self.running = BusyClock()

    async def run(self, spec: RolloutSpec) -> Status:
        """Run one rollout to its end; when this returns, the ledger has its trajectory.

        Only cancellation and a gateway that is gone are raised; everything that the workflow does is a status.
        """
        async with self._slots:
            rollout = self._rollout(spec, await self._open(spec))
            try:
                with self.running.one():
                    outcome = await self._outcome(spec, rollout)
            except asyncio.CancelledError:
                with contextlib.suppress(ArealAgentError, aiohttp.ClientError):
                    await self._end(rollout, CANCELLED)
                raise
            return await uninterrupted(self._end(rollout, outcome))

    async def _open(self, spec: RolloutSpec) -> dict[str, Any]:
        """Start the session. When that is cancelled, end it again: nobody else has its key."""
        body = {
            "task_id": spec.task.id,
            "group_id": spec.group_id,
            "session_id": spec.session_id,
            "purpose": spec.purpose.value,
            "seed": spec.seed,
            **self._manners[spec.benchmark].session,
        }
        starting = asyncio.ensure_future(self._post("/rl/start_session", self._admin_key, body))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(ArealAgentError, aiohttp.ClientError):
                await self._end(self._rollout(spec, await starting), CANCELLED)
            raise

    def _rollout(self, spec: RolloutSpec, session: Mapping[str, Any]) -> Rollout:
        return Rollout(
            client=self._client.copy(api_key=session["api_key"]),
            http_client=self._clients.agents,
            sync_client=self._sync_client,
            sync_http_client=self._clients.threads,
            base_url=session["base_url"],
            api_key=session["api_key"],
            model=self._model,
            seed=spec.seed,
            is_eval=spec.purpose is SessionPurpose.EVAL,
            sandbox=self._manners[spec.benchmark].sandbox,
            shared=self._shared,
            open_role=partial(self._open_role, spec),
        )

    async def _open_role(self, spec: RolloutSpec, name: str) -> Role:
        """Open another role. Raises EngineError where the gateway cannot: that is not the workflow's fault."""
        try:
            session = await self._open(spec.of_role(name))
        except (ArealAgentError, aiohttp.ClientError) as error:
            raise EngineError(f"the role {name!r} could not be opened: {error}") from error
        return Role(
            client=self._client.copy(api_key=session["api_key"]),
            sync_client=self._sync_client,
            base_url=session["base_url"],
            api_key=session["api_key"],
            model=self._model,
        )

    async def _outcome(self, spec: RolloutSpec, rollout: Rollout) -> _Outcome:
        """Run the workflow and clean up after it; failures of either become a status."""
        name = f"{ROLLOUT_TASK}{spec.session_id}"
        manner = self._manners[spec.benchmark]
        try:
            try:
                workflow = manner.workflow(dict(spec.task.data), rollout)
                returned = await _run_bounded(workflow, manner.timeout_s, name)
            finally:
                place = self._unawaited.pop(name, None)
                await rollout.aclose()
            return _outcome_of(returned, rollout, f"a call was made and not awaited: {place}" if place else None)
        except Reject as reject:
            return _Outcome(status=Status.REJECTED, error=_short(str(reject)))
        except _TooLong:
            return _Outcome(status=Status.TIMEOUT, error=f"it ran longer than rollout.timeout_s = {manner.timeout_s:g}")
        except Exception as error:  # the boundary: what a workflow raises is data
            if not isinstance(error, INFRA) and not self._models.have_failed(error):
                logger.info("rollout %s failed", spec.session_id, exc_info=error)
                return _Outcome(status=Status.ERROR, error=_describe(error))
            is_known = getattr(error, "status_code", None) == 507  # the disk is full, which ending the session tells
            logger.log(
                logging.INFO if is_known else logging.WARNING,
                "rollout %s failed, not because of the model: %s",
                spec.session_id,
                error,
            )
            return _Outcome(status=Status.INFRA, error=_describe(error))

    async def _give_rewards(self, role: Role, outcome: _Outcome) -> _Outcome:
        """Send the rewards to the gateway. A reward for an unknown completion is the workflow's error."""
        for (completion, name), reward in role.rewards.items():
            body = {"reward": reward, "interaction_id": completion, "name": name}
            try:
                await self._post("/rl/set_reward", role.api_key, body)
            except _Refused as refused:
                return _Outcome(status=Status.ERROR, error=str(refused))
        return outcome

    async def _end(self, rollout: Rollout, outcome: _Outcome) -> Status:
        """End the sessions: the rollout's own last, so that one that has ended is whole.

        A role that never called the model is no error where another one did.
        """
        roles = await rollout.opened_roles()
        for role in (*roles.values(), rollout):
            outcome = await self._give_rewards(role, outcome)
        of_roles = _Outcome(status=Status.COMPLETED) if outcome.status is Status.COMPLETED else outcome
        has_called = False
        for name, role in roles.items():
            ended, num_turns = await self._end_session(role, of_roles, may_be_silent=True)
            has_called = has_called or num_turns > 0
            if ended.status is Status.INFRA:
                outcome = _Outcome(status=Status.INFRA, error=f"role {name!r}: {ended.error}")
        return (await self._end_session(rollout, outcome, may_be_silent=has_called))[0].status

    async def _end_session(self, role: Role, outcome: _Outcome, *, may_be_silent: bool) -> tuple[_Outcome, int]:
        """End one session; return its outcome and number of turns.

        The gateway decides the final status: `completed` without a model call becomes an error.
        """
        body = {
            "status": outcome.status.value,
            "error": outcome.error,
            "logged": sendable(role.logged),
            "may_be_silent": may_be_silent,
        }
        try:
            ended = await self._post("/rl/end_session", role.api_key, body)
        except _Refused as refused:
            if refused.status not in SESSION_IS_OVER:
                raise
            logger.warning("a workflow ended its own session: %s", refused)  # the gateway has its status
            return _Outcome(status=Status.COMPLETED), 0
        return _Outcome(status=Status(ended["status"]), error=ended["error"]), ended["num_turns"]

    async def _post(self, path: str, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._clients.control.post(
            self._gateway_url + path,
            allow_redirects=False,
            data=orjson.dumps(body),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        ) as response:
            answer = orjson.loads(await response.read())
            if response.status == 507:
                raise DiskFull(answer["error"]["message"])
            if response.status != 200:
                raise _Refused(f"the gateway answered {path} with {response.status}: {answer}", response.status)
            return cast(dict[str, Any], answer)


class _Refused(ArealAgentError):
    """The gateway refused a control call."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _TooLong(Exception):
    """The workflow's time is up. Not TimeoutError: a workflow may raise that itself."""


async def _run_bounded(workflow: Awaitable[object], timeout_s: float, name: str) -> object:
    """Await it in a task of its own for at most `timeout_s`. On return that task has ended."""
    task = asyncio.create_task(_contained(workflow), name=name)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not done:
        await _cancel(task)
        raise _TooLong
    if task.cancelled():
        raise RuntimeError("the workflow cancelled itself")
    return task.result()


class _Exited(Exception):
    """A workflow raised what would end this process: SystemExit, KeyboardInterrupt, or another BaseException."""


async def _contained(workflow: Awaitable[object]) -> object:
    """Keep SystemExit and KeyboardInterrupt inside the task: asyncio would stop the whole loop for them."""
    try:
        return await workflow
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _Exited(_describe(error)) from None


async def _cancel(task: asyncio.Future[object]) -> None:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not done:
        logger.warning("a workflow ignores its cancellation; it is left behind: %r", task)
    elif not task.cancelled():
        task.exception()  # it was cancelled: an error that it raised meanwhile is of no interest


def _outcome_of(returned: object, rollout: Rollout, note: str | None) -> _Outcome:
    """Record the returned reward. Raises TypeError or ValueError when it is not one.

    The gateway decides whether a reward is missing, or a call of the model; the error is for that, as is `note`.
    """
    if isinstance(returned, Mapping):
        for completion, value in cast(Mapping[object, object], returned).items():
            rollout.reward(value, completion=str(completion))
    elif returned is not None:
        rollout.rewards[None, None] = as_reward(returned)
    if rollout.rejected is not None:
        return _Outcome(status=Status.REJECTED, error=rollout.rejected)
    if not any(name is None for _, name in rollout.rewards):
        note = f"the workflow returned {returned!r} and gave no reward: return a number" + (f"; {note}" if note else "")
    return _Outcome(status=Status.COMPLETED, error=note)


def _describe(error: BaseException) -> str:
    """Return `KeyError: 'answer' (my_agent.py:12)`: the error, and the last place in the workflow's own code."""
    if isinstance(error, _Exited):
        return str(error)
    said = error.__cause__ if isinstance(error, openai.APIConnectionError) and error.__cause__ else error
    return _short(f"{type(error).__name__}: {said}") + (f" ({last_line(error)})" if error.__traceback__ else "")


def _short(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return clean if len(clean) <= MAX_ERROR_CHARS else clean[:MAX_ERROR_CHARS] + "..."


def sendable(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a workflow logged as JSON types; a value that is no JSON or is too long becomes a shortened repr.

    >>> sendable({"n": 2**70, "ok": [1, None]})
    {'n': '1180591620717411303424', 'ok': [1, None]}
    """
    result: dict[str, Any] = {}
    room = MAX_ALL_LOGGED_BYTES
    for name, value in logged.items():
        try:
            text = orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS)
            fits = len(text) <= min(MAX_LOGGED_BYTES, room)
            result[_short(name)] = orjson.loads(text) if fits else _short(repr(value))
            room -= len(text) if fits else 0
        except (TypeError, ValueError, RecursionError):  # integers beyond 64 bits, lone surrogates, deep nesting
            result[_short(name)] = _short(repr(value))
    return result
