"""Every error that areal_agent raises on purpose, named by the boundary at which it arises.

::

    ArealAgentError
    ├── ConfigError            a config, a flag or a file named there is wrong: one line, exit code 2
    ├── RequestError           an agent's HTTP request is wrong: an OpenAI-shaped error object
    ├── EngineError            an inference engine failed
    │   ├── EngineUnreachable  the engine gave no answer: it is down, dying or not started
    │   ├── EngineRejected     the engine answered that the request is wrong
    │   │   └── ServerRefused  a server may not join or leave a fleet
    │   └── WeightUpdateError  the engine did not take new weights; the old version is still serving
    │       ├── EnginesGone    no server was left in the middle of a push
    │       └── PushConflict   another push of weights is open, or this one is not
    ├── TrainerError           the trainer process answered with a failure
    ├── WorkerError            a rollout worker answered with a failure
    ├── GatewayError           a gateway that stands alone refused a trainer's call, or is gone
    ├── ProcessDied            a process of the run ended by itself
    │   └── TrainerDied        the trainer, one of its ranks, or a machine of theirs
    ├── LedgerError            the ledger of a run folder is locked, cannot be written or contradicts itself
    │   ├── LedgerDamaged      its file is damaged: the run cannot be resumed on it
    │   └── WrittenBefore      what is to be written is in the ledger already
    ├── DiskFull               a disk is full: nothing can be written to a run folder until there is room
    ├── TakenOver              a later incarnation of the run holds its checkpoints: this one may publish nothing
    ├── RolloutsFailing        group after group fails or teaches nothing: the run would train nothing
    ├── LoopBlocked            raised in a workflow that has blocked the event loop for too long
    ├── SandboxError           a sandbox failed; never the verdict on the program that ran in it
    └── Reject                 raised by a workflow: do not train this rollout

A message says what was wrong, the value received, and the remedy.
"""

import errno
from pathlib import Path
from typing import Literal, Self

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk, and of a user who may write no more to it."""


class ArealAgentError(Exception):
    """The root: catch it to catch everything that areal_agent raises on purpose."""


class ConfigError(ArealAgentError):
    """A config, a command line, or a file named there is wrong. Commands print it as one line and exit with 2."""


class RequestError(ArealAgentError):
    """A request to the gateway cannot be honoured. The agent receives it as OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s  # sent as the header Retry-After


class EngineError(ArealAgentError):
    """An inference engine failed."""


class EngineUnreachable(EngineError):
    """The engine gave no answer: it is down, dying, or not started yet."""


class EngineRejected(EngineError):
    """The engine answered that the request is wrong (HTTP 400): sending it again unchanged will not help."""


class ServerRefused(EngineRejected):
    """A server may not join or leave a fleet. `code` gives the reason, for programs."""

    def __init__(
        self, message: str, *, code: Literal["known_server", "unknown_server", "last_server", "another_model"]
    ) -> None:
        super().__init__(message)
        self.code = code


class WeightUpdateError(EngineError):
    """The engine did not take new weights. Its old version is still serving."""


class EnginesGone(WeightUpdateError):
    """No server was left in the middle of a push. The push may be repeated once a server is back."""


class PushConflict(WeightUpdateError):
    """Another push of weights is open, or the named push is not (HTTP 409)."""


class TrainerError(ArealAgentError):
    """The trainer process answered a command with a failure."""


class WorkerError(ArealAgentError):
    """A rollout worker could not run a rollout at all. A workflow that fails is not an error here but a status."""


class GatewayError(ArealAgentError):
    """A gateway that stands alone refused a trainer's call, or did not answer for too long."""


class ProcessDied(ArealAgentError):
    """A process of the run ended by itself. The message has its exit status and its last log lines."""


class TrainerDied(ProcessDied):
    """The trainer or one of its ranks ended by itself, or its machine is gone; the others cannot go on without it."""


class LedgerError(ArealAgentError):
    """The ledger of a run folder is locked by another run, cannot be written, or contradicts itself."""


class LedgerDamaged(LedgerError):
    """A file of the ledger is damaged. Its run cannot be resumed; a new one may begin with its last checkpoint."""


class WrittenBefore(LedgerError):
    """What is to be written is in the ledger already, or contradicts what is there."""


class DiskFull(ArealAgentError):
    """A disk is full: nothing can be written to a run folder until there is room, but a resume goes on from there."""

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the error for a file that could not be written."""
        return cls(f"the disk of {path.parent} is full: {path.name} could not be written; make room there")


class TakenOver(ArealAgentError):
    """A later incarnation of the run has claimed its checkpoints. This one may publish nothing any more, and ends."""


class RolloutsFailing(ArealAgentError):
    """Group after group failed as a whole or had no spread in reward: the run would train nothing."""


class LoopBlocked(ArealAgentError):
    """A workflow has blocked the event loop of its process beyond the limit. It is raised at the line that blocks."""


class SandboxError(ArealAgentError):
    """A sandbox could not run a program at all. How a program itself ended is an `ExecResult`, never this error."""


class Reject(ArealAgentError):
    """Raise it in a workflow to say that this rollout must not be trained; the reason is recorded."""


def unwritable(path: Path, error: OSError) -> ArealAgentError:
    """Return the error for a file of a run that could not be written."""
    if error.errno in NO_ROOM:
        return DiskFull.at(path)
    return ArealAgentError(f"{path} could not be written: {error.strerror}; mend that and resume the run")
