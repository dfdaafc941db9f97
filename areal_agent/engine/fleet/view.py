"""What one process knows of a fleet's servers, for others that use them, too. Plain data."""

from collections.abc import Mapping

from areal_agent.section import Section


class FleetView(Section):
    """A server that stands in neither has left."""

    serving: tuple[str, ...]
    out: Mapping[str, str]
    """Why, by URL: they are not to be asked for now."""
    versions: tuple[str, ...]
    """One of which every server that serves has: the one that is due, and one that is being committed."""
    is_loading: bool = False
    """Whether servers load weights now: they may be silent meanwhile, and none of them hangs."""
