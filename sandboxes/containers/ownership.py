"""Whose a container is: labels that outlive its maker, and what is done when the maker is dead. It starts nothing."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from sandboxes.owner import is_abandoned, own_tag

OWNER_LABEL = "areal-agent.sandboxes.owner"
HOLDER_LABEL = "areal-agent.sandboxes.holder"
LEASE_LABEL = "areal-agent.sandboxes.lease"
START_LEASE_S = 600.0
"""How long a container may stay unstarted. A longer one has no maker, even if nobody here can tell who that was."""


class Ownership:
    """The labels of one provider's containers."""

    def __init__(self) -> None:
        self._owner = own_tag()
        self._holder = secrets.token_hex(8)

    @property
    def filter(self) -> str:
        """What finds them, and no other provider's."""
        return f"{HOLDER_LABEL}={self._holder}"

    def labels(self) -> dict[str, str]:
        return {
            OWNER_LABEL: self._owner,
            HOLDER_LABEL: self._holder,
            LEASE_LABEL: str(int(time.time() + START_LEASE_S)),
        }


def is_orphan(container: Mapping[str, Any]) -> bool:
    """Whether its maker is known to be dead, or it was never started and its lease is over."""
    labels = container.get("Labels") or {}
    lease = labels.get(LEASE_LABEL, "")
    is_over = container.get("State") == "created" and lease.isdecimal() and int(lease) < time.time()
    return is_over or is_abandoned(labels.get(OWNER_LABEL, ""))
