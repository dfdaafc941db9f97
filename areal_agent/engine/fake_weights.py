"""The weights of the scripted engine: none, so any will do. What is stored is read and proved as the real engine does.

A path behind which nothing lies is a name in a test's script: it is taken at its word, unless it is to be damaged.
"""

from dataclasses import dataclass
from pathlib import Path

from areal_agent.engine.fake_faults import Faults
from areal_agent.engine.stored_weights import Spoil, take_folder, take_shared_memory
from areal_agent.engine_types import CudaWeights, DiskWeights, DistributedWeights, Weights
from areal_agent.errors import WeightUpdateError
from areal_agent.types import WeightVersion


@dataclass(kw_only=True, slots=True)
class FakeWeights:
    """A `pushes.PushTarget`."""

    version: WeightVersion
    faults: Faults
    updates: list[Weights]  # all that have served since the start, in order

    async def take(self, weights: Weights) -> Weights:
        """The same, when its bytes are what its digests say."""
        prove(weights, self.faults.next_spoil())
        return weights

    async def holds(self, taken: Weights) -> bool:
        return True  # there is no model that could differ

    async def swap(self, taken: Weights, version: WeightVersion, *, flush_cache: bool) -> None:
        self.updates.append(taken)
        self.version = version


def prove(weights: Weights, spoil: Spoil | None) -> None:
    """Raises WeightUpdateError for bytes that are not what was written."""
    if isinstance(weights, CudaWeights):
        raise WeightUpdateError("the scripted engine has no GPU; send shared memory or a folder")
    if isinstance(weights, DistributedWeights):
        raise WeightUpdateError("the scripted engine joins no process group; send shared memory or a folder")
    if not Path(weights.path).exists():
        if spoil is not None:
            raise WeightUpdateError(f"nothing lies at {weights.path!r}, so the push was damaged as a whole")
    elif isinstance(weights, DiskWeights):
        take_folder(weights, spoil)
    else:
        take_shared_memory(weights, spoil)
