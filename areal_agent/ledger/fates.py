"""Which fate a rollout gets that ended with nothing to train. It knows statuses alone."""

from collections.abc import Mapping

from areal_agent.types import Drop, Status

FATE_OF_STATUS: Mapping[Status, Drop] = {
    Status.MISSING_REWARD: Drop.MISSING_REWARD,
    Status.REJECTED: Drop.REJECTED,
    Status.INFRA: Drop.INFRA,
    Status.ERROR: Drop.ERROR,
    Status.TIMEOUT: Drop.ERROR,
    Status.CANCELLED: Drop.ORPHAN,
    Status.ORPHAN: Drop.ORPHAN,
}
"""Every status but `completed`."""
