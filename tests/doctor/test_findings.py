"""What becomes of failures, and of what others say.

- an error is split into what was found and what to change; that of a process that died is in its log
- a check that fails is a finding, also one that takes too long, and the next is made; a cancellation goes on
- what the sandboxes say of a machine, by the backend of a config
- arguments of servers, in both ways of writing them
- nothing is cut from a finding in a file, and the last line counts
"""

import asyncio
import io
from collections.abc import Mapping

import pytest

from areal_agent.doctor.findings import Finding, Report, State, attempt, examined
from areal_agent.doctor.settings import judge
from areal_agent.engine.config import EngineConfig, EnginePlan
from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.rollout.config import SandboxConfig

DIED = "the engine process exited with 2; the end of its log:\n    INFO loading\n    error: no room; raise kv_tokens"


@pytest.mark.parametrize(
    ("error", "found", "change"),
    [
        (ConfigError("engine.port = 80: in use; choose another"), "engine.port = 80: in use", "choose another"),
        (ProcessDied(DIED), "the engine process exited with 2\nerror: no room", "raise kv_tokens"),
        (ProcessDied("it died; its log:\n    Killed; or so"), "it died\nKilled; or so", ""),
        (ConfigError("no remedy"), "no remedy", ""),
        (ValueError(), "ValueError", ""),
    ],
)
def test_an_error_is_split(error: Exception, found: str, change: str) -> None:
    finding = Finding.of_error("check", error)
    assert (finding.state, finding.found, finding.change) == (State.FAIL, found, change)


async def failing(error: BaseException) -> list[Finding]:
    raise error


async def test_a_failure_is_a_finding_and_hides_no_other() -> None:
    report = Report(io.StringIO())
    await examined(report, "first", failing(RuntimeError("it\n broke")))
    assert await attempt(report, "second", asyncio.Event().wait(), limit_s=0.0) is None
    await examined(report, "third", failing(ConfigError("wrong; mend it")))
    found = [(finding.check, finding.found, finding.change) for finding in report.findings]
    assert found == [
        ("first", "RuntimeError: it broke", ""),
        ("second", "no answer within 0 s", ""),
        ("third", "wrong", "mend it"),
    ]
    with pytest.raises(asyncio.CancelledError):
        await examined(report, "fourth", failing(asyncio.CancelledError()))


NOTHING: Mapping[str, str | None] = {"containers": "no daemon", "jails": "not allowed"}


@pytest.mark.parametrize(
    ("config", "works", "state"),
    [
        (SandboxConfig(backend="docker"), "containers", State.OK),
        (SandboxConfig(backend="docker"), "jails", State.FAIL),
        (SandboxConfig(backend="jail"), "jails", State.OK),
        (SandboxConfig(backend="bubblewrap"), "jails", State.OK),
        (SandboxConfig(backend="namespaces"), "containers", State.FAIL),
        (SandboxConfig(backend="embedded"), "containers", State.WARN),
        (SandboxConfig(backend="embedded", min_isolation="none"), "containers", State.WARN),
        (SandboxConfig(backend="embedded", min_isolation="namespaces"), "containers", State.FAIL),
        (SandboxConfig(backend="embedded", min_isolation="container"), "jails", State.FAIL),
        (SandboxConfig(backend="auto"), "containers", State.OK),
        (SandboxConfig(backend="auto", min_isolation="namespaces"), "jails", State.OK),
        (SandboxConfig(backend="auto", min_isolation="container"), "containers", State.OK),
        (SandboxConfig(backend="auto", min_isolation="container"), "jails", State.FAIL),
        (SandboxConfig(backend="subprocess", min_isolation="process"), "containers", State.WARN),
        (SandboxConfig(backend="subprocess", min_isolation="namespaces"), "containers", State.FAIL),
        (SandboxConfig(backend="subprocess"), "containers", State.WARN),
    ],
)
def test_sandboxes_by_backend(config: SandboxConfig, works: str, state: State) -> None:
    assert judge(config, {**NOTHING, works: None}).state is state


@pytest.mark.parametrize(
    ("words", "gpus", "fraction"),
    [
        ((), [0], 0.9),
        (("--tp", "2", "--mem-fraction-static=0.5"), [0, 1], 0.5),
        (("--dp-size=2", "--tensor-parallel-size", "2", "--base-gpu-id", "1"), [1, 2, 3, 4], 0.9),
        (("--enable-metrics", "--gpu-memory-utilization", "0.4"), [0], 0.4),
        (("--tp-size", "many"), [0], 0.9),
    ],
)
def test_arguments_of_servers(words: tuple[str, ...], gpus: list[int], fraction: float) -> None:
    plan = EnginePlan.of(EngineConfig(backend="sglang", python="python", server_args=words))
    assert [number for number in range(8) if plan.num_servers_on(number)] == gpus
    assert plan.memory_fraction == fraction


def test_a_report_in_a_file() -> None:
    stream = io.StringIO()
    report = Report(stream)
    report.add(Finding("a", State.WARN, "long " * 60 + "end", "[this]"))
    report.skip("b", "c", why="no reason")
    report.sum_up()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("warn  a             long") and lines[0].endswith("end")
    assert lines[1].strip() == "-> [this]"
    assert lines[2] == "skip  b             not checked: no reason"
    assert lines[-2] == "1 warn, 2 skip: no fault was found here, but see the warnings"
    assert lines[-1] == "not tried, and may still fail: b, c"
    assert not report.has_failed
