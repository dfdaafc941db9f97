"""How a program in a container ended, by what the kernel told the agent. Nothing that it printed makes it OK."""

import os

from sandboxes.containers.agent.wire import End
from sandboxes.containers.agent_link import AgentEnd
from sandboxes.execution import status_of
from sandboxes.limits import Limits
from sandboxes.link import Ended
from sandboxes.result import ExecResult, Status

STATUS_OF_END = {End.DEADLINE: Status.TIMEOUT, End.OUTPUT: Status.OUTPUT_LIMIT}


def result_of(end: AgentEnd, stdout: bytes, stderr: bytes, limits: Limits) -> ExecResult:
    code = os.waitstatus_to_exitcode(end.wait_status)
    return ExecResult(
        status=_status(code, end, stderr, limits),
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=stdout,
        stderr=stderr,
        truncated=end.is_cut,
        wall_s=end.wall_s,
        cpu_s=end.cpu_s,
        peak_memory_bytes=end.peak_memory_bytes,
        oom_kills=end.oom_kills,
    )


def _status(code: int, end: AgentEnd, stderr: bytes, limits: Limits) -> Status:
    if end.oom_kills:
        return Status.MEMORY
    if end.refused_forks:
        return Status.PIDS
    if end.reason in STATUS_OF_END:
        return STATUS_OF_END[end.reason]
    ended = Ended(wait_status=end.wait_status, cpu_s=end.cpu_s, peak_memory_bytes=end.peak_memory_bytes)
    return status_of(code, ended, stderr, limits, has_group=True)
