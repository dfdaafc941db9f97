"""The handlers for the owner of a rollout: start a session, reward it, end it, export it.

A session is kept while it is open and for a while after. Of older ones, and those of an earlier process, the archive
(the ledger) tells how they ended, and the consumer decides whether a reward is still accepted. `Callers` checks keys: a
session's key gives access to that session only.
"""

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web
from pydantic import WithJsonSchema

from areal_agent.errors import LedgerError, RequestError, WrittenBefore
from areal_agent.gateway.auth import caller_hashes, key_hash, new_key
from areal_agent.gateway.bodies import BodyReader, Name, Number
from areal_agent.gateway.online.consumer import Consumer
from areal_agent.gateway.server import json_reply
from areal_agent.gateway.session import (
    EndRequest,
    ExportRequest,
    RewardRequest,
    Session,
    SessionState,
    StartRequest,
    has_ended,
)
from areal_agent.gateway.sessions import Sessions, Traffic, session_exists
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.process import uninterrupted
from areal_agent.protocols import Journal
from areal_agent.tokens.records import token_records
from areal_agent.types import SessionPurpose, SessionRecord, Status, Trajectory

WHERE_THE_ADMIN_KEY_IS = (
    "a stand-alone gateway prints where it is at its start (by default in the file admin_key, in the folder of its "
    "ledger)"
)


class Callers:
    """Identifies callers by the hash of their key."""

    def __init__(self, admin_key: str, sessions: Sessions) -> None:
        self._admin_key_hash = key_hash(admin_key)
        self._sessions = sessions

    def of(self, request: web.Request) -> str:
        """Return the hash of a request's key. Of several, the first known one: the others may be of other services."""
        callers = caller_hashes(request.headers)
        known = (one for one in callers if self._is_admin(one) or self._sessions.with_key(one) is not None)
        return next(known, callers[0])

    def require_admin(self, request: web.Request) -> None:
        caller = self.of(request)
        if self._is_admin(caller):
            return
        fault = "this call needs the gateway's admin key"
        if self._sessions.with_key(caller) is not None:
            raise RequestError(f"{fault}, not a session's key; {WHERE_THE_ADMIN_KEY_IS}", status=403)
        raise RequestError(
            f"{fault}, and the API key is a different one; {WHERE_THE_ADMIN_KEY_IS}", status=401, code="invalid_api_key"
        )

    def require_any(self, request: web.Request) -> None:
        caller = self.of(request)
        if not self._is_admin(caller):
            self.session(caller)

    def session(self, caller: str) -> Session:
        """Return the session whose key has this hash; raises RequestError if there is none."""
        session = self._sessions.with_key(caller)
        if session is not None:
            return session
        if self._is_admin(caller):
            raise RequestError("this is the admin key; use the api_key that /rl/start_session returned", status=403)
        raise RequestError(
            "the API key belongs to no session; use the api_key that /rl/start_session returned",
            status=401,
            code="invalid_api_key",
        )

    def _is_admin(self, caller: str) -> bool:
        return hmac.compare_digest(caller, self._admin_key_hash)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedSession:
    """The answer of `/rl/start_session`. Anthropic's clients add /v1 to their base URL themselves."""

    session_id: Name
    api_key: str
    base_url: str
    anthropic_base_url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardedSession:
    """The answer of `/rl/set_reward`."""

    session_id: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedSession:
    """The answer of `/rl/end_session`."""

    session_id: Name
    status: Status
    error: str | None  # why it has this status, if that was said or the gateway decided it
    num_turns: Number
    num_sampled_tokens: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTrajectory:
    """The answer of `/export_trajectories`."""

    trajectory: Trajectory
    records: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})]  # of TokenRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCalls:
    """The handlers of `/rl/start_session`, `/rl/set_reward`, `/rl/end_session` and `/export_trajectories`."""

    sessions: Sessions
    traffic: Traffic
    callers: Callers
    bodies: BodyReader
    journal: Journal
    make_session: Callable[[SessionRecord, StartRequest], Session]
    archive: Ledger | None
    consumer: Consumer | None

    async def start(self, request: web.Request) -> web.Response:
        self.callers.require_admin(request)
        start = StartRequest.read(await self.bodies.control(request))
        if self.consumer is None and start.group_size is not None:
            raise RequestError(
                "group_size is only for a gateway that a trainer leases from; this one is part of a run, which "
                "forms its groups itself; leave it out",
                param="group_size",
                code="unsupported_parameter",
            )
        api_key = new_key()
        record = start.record(api_key)
        session = self.make_session(record, start)
        try:
            await uninterrupted(self._open(session, start))
        except asyncio.CancelledError:  # its client hung up: the journal has the session, and nobody has its key
            if self.sessions.with_id(record.id) is session and session.state is SessionState.OPEN:
                await session.end(EndRequest(status=Status.CANCELLED, error="its client hung up before it had the key"))
            raise
        origin = str(request.url.origin())  # the address that this caller reached us by
        return json_reply(
            StartedSession(session_id=record.id, api_key=api_key, base_url=f"{origin}/v1", anthropic_base_url=origin)
        )

    async def _open(self, session: Session, start: StartRequest) -> None:
        """Count, admit and journal a session; if any of that fails, it never was."""
        self.sessions.require_free(session.record.id)
        with contextlib.ExitStack() as undo:
            self.traffic.enter(session.record.id)
            undo.callback(self.traffic.leave, session.record.id)
            if self.consumer is not None and start.purpose is SessionPurpose.TRAIN:
                self.consumer.admit(start.session_id, start.group_id, start.group_size)
                undo.callback(self.consumer.withdraw, start.session_id)
            self.sessions.add(session)
            undo.callback(self.sessions.remove, session)
            try:
                await self.journal.open_session(session.record)
            except WrittenBefore:  # it ended so long ago that only the ledger has it
                raise session_exists(session.record.id) from None
            undo.pop_all()

    async def set_reward(self, request: web.Request) -> web.Response:
        """Accept a reward while the session is open; with a trainer, until its trajectory is leased or dropped."""
        session = await self._session_of(request)
        session_id = session.record.id if isinstance(session, Session) else session.session_id
        with self.traffic.call(session_id):
            reward = RewardRequest.read(await self.bodies.control(request))
            if isinstance(session, Session) and not (self.consumer and session.state is SessionState.ENDED):
                session.reward(reward)
            elif self.consumer:
                await self.consumer.reward_late(session_id, reward)
            else:
                raise has_ended(session_id)
        return json_reply(RewardedSession(session_id=session_id))

    async def end(self, request: web.Request) -> web.Response:
        """End the session. A repeated call, after a lost answer, returns the first call's result."""
        session = await self._session_of(request)
        if not isinstance(session, Session):
            return _ended(session)
        with self.traffic.call(session.record.id):
            end = EndRequest.read(await self.bodies.control(request)).without_keys()
            is_open = session.state is SessionState.OPEN
            return _ended(await session.end(end) if is_open else await session.ended())

    async def export(self, request: web.Request) -> web.Response:
        """Export from the archive if there is one, because it has late rewards and fates."""
        self.callers.require_admin(request)
        session_id = ExportRequest.read(await self.bodies.control(request)).session_id
        if self.archive is None or self.sessions.is_open(session_id):
            trajectory = self.sessions.ended(session_id).trajectory
            assert trajectory is not None  # it has ended
        else:
            trajectory = await self._archived(self.archive, session_id)
        return json_reply(ExportedTrajectory(trajectory=trajectory, records=token_records(trajectory)))

    async def session_for_turn(self, request: web.Request) -> Session:
        """Return the session of a turn. A key of an earlier process's session gets 409 `session_ended`, not 401."""
        session = await self._session_of(request)
        if isinstance(session, Session):
            return session
        raise has_ended(session.session_id, f"has ended as {session.status}")

    # ------------------------------------------------------------------------------------------- internals

    async def _session_of(self, request: web.Request) -> Session | Trajectory:
        """Return the caller's session, or the trajectory of one that is only in the archive. Raises RequestError."""
        caller = self.callers.of(request)
        if self.archive is not None and self.sessions.with_key(caller) is None:
            session_id = await self.archive.ask(questions.session_with_key, caller)
            if session_id is not None:
                return await self._archived(self.archive, session_id)
        return self.callers.session(caller)

    async def _archived(self, archive: Ledger, session_id: str) -> Trajectory:
        try:
            return await archive.trajectory(session_id)
        except LedgerError as error:
            raise RequestError(
                f"no ended session {session_id!r} was found: {error}",
                status=404,
                param="session_id",
                code="session_not_found",
            ) from error


def _ended(trajectory: Trajectory) -> web.Response:
    return json_reply(
        EndedSession(
            session_id=trajectory.session_id,
            status=trajectory.status,
            error=trajectory.error,
            num_turns=len(trajectory.turns),
            num_sampled_tokens=trajectory.num_sampled_tokens,
        )
    )
