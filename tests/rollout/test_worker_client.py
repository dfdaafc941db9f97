"""What a run and its workers send each other, and the channel that carries it.

- Every message comes back as it was sent; an unknown field, an unknown kind and a wrong type are errors.
- Frames arrive whole, in order, of any size. The end of the other side is EOFError, also in the middle of a frame and
  after a reset. A channel that was ended reads no more.
- A write of a worker elsewhere ends when the run confirms it, fails with its reason, and fails when the run is gone.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_agent import Status, Task
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.fleet.member import FleetView
from areal_agent.errors import LedgerError
from areal_agent.gateway.metrics import Counters
from areal_agent.ledger.encoding import CompletionRow, EndingRow, TurnRow
from areal_agent.rollout import worker_client as wire
from areal_agent.rollout.config import RolloutConfig, SandboxConfig
from areal_agent.rollout.local import LocalSettings
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.worker import RemoteJournal
from areal_agent.types import EngineInfo, ForkReason, SessionPurpose, SessionRecord, WeightVersion

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.dictionaries(st.text(), JSON, max_size=4), seed=st.integers(0, 2**63 - 1))
def test_a_rollout_comes_as_it_was_sent(data: dict, seed: int) -> None:
    spec = RolloutSpec(
        session_id="s", group_id="g", task=Task(id="t", data=data), seed=seed, purpose=SessionPurpose.EVAL
    )
    call = wire.RunCall(number=1, spec=spec)
    assert wire.CALLS.validate_json(wire.encode(call)) == call


@pytest.mark.parametrize(
    "call",
    [
        wire.CancelCall(number=1),
        wire.StatsCall(number=2),
        wire.Written(number=3, error="full"),
        wire.EnginesCall(view=FleetView(serving=("http://a",), out={"http://b": "it hangs"}, versions=("0:7",))),
    ],
    ids=lambda one: one.kind,
)
def test_calls(call: wire.CancelCall | wire.StatsCall | wire.EnginesCall) -> None:
    assert wire.CALLS.validate_json(wire.encode(call)) == call


def counted() -> wire.Counted:
    counters = Counters()
    counters.turns = 3
    counters.forks[ForkReason.EDITED] = 2
    counters.errors[409] = 1
    return wire.Counted(
        number=3,
        gateway=counters.snapshot(num_open_sessions=1),
        loop_blocked_s=0.5,
        engine_spans=((1.0, 2.5), (3.0, 4.0)),
        until_s=5.0,
    )


@pytest.mark.parametrize(
    "answer",
    [
        wire.Ready(),
        wire.Refused(message="no"),
        wire.Ended(number=1, status=Status.TIMEOUT),
        wire.Failed(number=2, message="m"),
        wire.Warned(message="w"),
        counted(),
        wire.AppendTurn(
            number=4,
            session_id="s",
            turn=TurnRow("t", None, 0, None, b"\x00\xff\x81", "[]", "{}", 1.5, 2.5),
            completions=(CompletionRow("c", b"\xfe\xff", b"\x80", "[]", "stop", "exact"),),
        ),
        wire.CloseSession(
            number=5, session_id="s", ending=EndingRow("completed", None, 0.5, "{}", "{}", "{}", "[]", 3.5)
        ),
    ],
    ids=lambda one: one.kind,
)
def test_answers(answer: wire.Ready) -> None:
    assert wire.ANSWERS.validate_json(wire.encode(answer)) == answer


def test_settings() -> None:
    local = LocalSettings(
        model_name="m",
        tokenizer=Path("tokenizer"),
        port=0,
        max_concurrent=4,
        rollout=RolloutConfig(workers=2),
        sandbox=SandboxConfig(),
    )
    settings = wire.WorkerSettings(
        number=1,
        workflow="package.module:name",
        sys_path=("", "lib"),
        engine=EngineAddress(backend="embedded", urls=("http://127.0.0.1:1",)),
        info=EngineInfo(model_path="m", weight_version=WeightVersion(), vocab_size=2, max_context_tokens=3),
        shard="ledger-w1.sqlite",
        local=local,
    )
    assert wire.WorkerSettings.model_validate_json(wire.encode(settings)) == settings


@pytest.mark.parametrize(
    "payload",
    [
        b'{"kind": "cancel", "number": 1, "force": true}',
        b'{"kind": "pause", "number": 1}',
        b'{"kind": "cancel", "number": "one"}',
        b'{"kind": "cancel"}',
        b"[]",
        b"",
    ],
)
def test_everything_else_is_an_error(payload: bytes) -> None:
    with pytest.raises(ValidationError):
        wire.CALLS.validate_json(payload)


Ends = tuple[wire.Channel, wire.Channel]


@pytest_asyncio.fixture
async def ends() -> AsyncGenerator[Ends]:
    one, other = socket.socketpair()
    channels = await wire.Channel.over(one), await wire.Channel.over(other)
    yield channels
    for channel in channels:
        await channel.aclose()


async def test_frames_arrive_whole_and_in_order(ends: Ends) -> None:
    payloads = [b"", b"a", b"x" * 5_000_000, b"last"]
    for payload in payloads:
        ends[0].send(payload)
    assert [await ends[1].receive() for _ in payloads] == payloads


async def test_the_end_of_the_other_side(ends: Ends) -> None:
    ends[0].send(b"last words")
    await ends[0].aclose()
    assert await ends[1].receive() == b"last words"
    with pytest.raises(EOFError):
        await ends[1].receive()


@pytest.mark.parametrize(("ours_sent", "theirs_sent"), [(b"", wire.LENGTH.pack(10) + b"half"), (b"never read", b"")])
async def test_an_end_in_the_middle_of_a_frame_or_with_frames_unread(ours_sent: bytes, theirs_sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = await wire.Channel.over(ours)
    if ours_sent:
        channel.send(ours_sent)
    theirs.sendall(theirs_sent)
    theirs.close()
    with pytest.raises(EOFError):
        await channel.receive()
    await channel.aclose()


async def test_an_ended_channel_reads_no_more(ends: Ends) -> None:
    waiting = asyncio.create_task(ends[0].receive())
    await asyncio.sleep(0)
    ends[0].end()
    with pytest.raises(EOFError):
        await waiting


SESSION = SessionRecord(
    id="s", group_id="g", task_id="t", purpose=SessionPurpose.TRAIN, seed=0, key_hash="0" * 64, started_s=1.0
)


async def test_a_write_elsewhere_ends_when_it_is_confirmed(ends: Ends) -> None:
    journal = RemoteJournal(ends[0])
    writing = asyncio.create_task(journal.open_session(SESSION))
    assert wire.ANSWERS.validate_json(await ends[1].receive()) == wire.OpenSession(number=1, session=SESSION)
    assert not writing.done()
    journal.written(wire.Written(number=1))
    await writing


async def test_a_write_elsewhere_that_fails_says_why(ends: Ends) -> None:
    journal = RemoteJournal(ends[0])
    writing = asyncio.create_task(journal.open_session(SESSION))
    await ends[1].receive()
    journal.written(wire.Written(number=1, error="the disk is full"))
    with pytest.raises(LedgerError, match="the disk is full"):
        await writing


async def test_a_write_elsewhere_whose_caller_was_cancelled_is_confirmed_to_nobody(ends: Ends) -> None:
    journal = RemoteJournal(ends[0])
    given_up, writing = (asyncio.create_task(journal.open_session(SESSION)) for _ in range(2))
    for _ in range(2):
        await ends[1].receive()
    given_up.cancel()
    await asyncio.wait({given_up})
    journal.written(wire.Written(number=1))
    journal.written(wire.Written(number=2))
    await writing


async def test_writes_elsewhere_fail_once_the_run_is_gone(ends: Ends) -> None:
    journal = RemoteJournal(ends[0])
    writing = asyncio.create_task(journal.open_session(SESSION))
    await ends[1].receive()
    journal.lose()
    with pytest.raises(LedgerError, match="is gone"):
        await writing
    with pytest.raises(LedgerError, match="is gone"):
        await journal.open_session(SESSION)
