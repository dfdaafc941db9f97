"""What the trainer saw of single tokens, kept for a share of the trajectories: `observe.token_records`.

    token_records/step_000012-0.npz     what rank 0 trained in step 12, compressed

A file has the chosen records of a step, one after the other: for each loss token its position in the record, the
log-probability that the trainer gave it in its update, that of the proximal policy, and its advantage. The engine's
log-probability and the weight version are in the ledger. Whether a trajectory is chosen follows from its session's
name, so all ranks agree. A step that is trained again replaces its file; the ledger's lease says which step counts.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_agent.errors import LedgerError
from areal_agent.files import no_device

logger = logging.getLogger(__name__)

FOLDER = "token_records"


class SeenTokens(NamedTuple):
    """The loss tokens of one record as the trainer saw them, [M] each; log-probabilities in nats."""

    positions: NDArray[np.int32]  # in the record's tokens
    logprobs: NDArray[np.float32]  # of the policy in the update that trained them
    proximal: NDArray[np.float32]  # of the policy around which ratios are clipped
    advantages: NDArray[np.float32]


class TokenRecorder:
    """Keeps what one rank of the trainer sees, and writes it at the end of each step."""

    def __init__(self, folder: Path, share: float, rank: int = 0) -> None:
        self._folder = folder
        self._share = share
        self._rank = rank
        self._kept: dict[tuple[str, int], SeenTokens] = {}  # by session and branch

    def keeps(self, session_id: str) -> bool:
        """Return whether the trajectory is one of those that are kept."""
        digest = blake2b(session_id.encode(), digest_size=4).digest()  # names that are alike do not fall together
        return int.from_bytes(digest) < self._share * 2**32

    def add(self, session_id: str, branch: int, seen: SeenTokens) -> None:
        self._kept[session_id, branch] = seen

    def write(self, step: int) -> None:
        """Write what was added since the last step. A disk that fails is reported, and the run goes on."""
        path = _path(self._folder, step, self._rank)
        kept, self._kept = self._kept, {}
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(one, name) for one in kept.values()]) for name in SeenTokens._fields if kept
        }
        try:
            path.unlink(missing_ok=True)
            if not kept:
                return
            self._folder.mkdir(exist_ok=True)
            whole = path.with_suffix(".part")
            with whole.open("wb") as file:
                np.savez_compressed(
                    file,
                    sessions=np.array([session_id for session_id, _ in kept]),
                    branches=np.array([branch for _, branch in kept]),
                    lengths=np.array([len(one.positions) for one in kept.values()]),
                    **columns,
                )
            os.replace(whole, path)
        except OSError as error:
            logger.warning(
                "%s could not be written: %s; make room, or set observe.token_records=0", path, error.strerror
            )


def read_seen(run_dir: Path, step: int, session_id: str) -> Mapping[int, SeenTokens]:
    """Return what was kept of a trajectory that a step trained, by branch. Raises LedgerError for a damaged file."""
    seen: dict[int, SeenTokens] = {}
    for path in sorted((run_dir / FOLDER).glob(f"step_{step:06d}-*.npz")):
        try:
            with np.load(no_device(path)) as file:
                ends = np.cumsum(file["lengths"]).tolist()
                found: Sequence[int] = np.flatnonzero(file["sessions"] == session_id).tolist()
                columns = [file[name] for name in SeenTokens._fields] if found else []
                for place in found:
                    own = slice(ends[place] - int(file["lengths"][place]), ends[place])
                    seen.setdefault(int(file["branches"][place]), SeenTokens(*(one[own] for one in columns)))
        except Exception as error:  # a damaged archive of damaged arrays may raise anything
            raise LedgerError(f"{path} is damaged: {error!r:.200}; remove that file") from error
    return seen


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step_{step:06d}-{rank}.npz"
