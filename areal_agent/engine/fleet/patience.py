"""How long a fleet waits for what, in seconds. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """The defaults are those of the config section `engine`."""

    hung_after_s: float = 30.0  # a server that neither answers nor samples for so long is hung
    wait_s: float = 120.0  # requests and pushes wait so long while no server serves
    probe_every_s: float = 5.0  # how often a server is asked how it is
    probe_timeout_s: float = 4.0  # how long its answer may take; a failure within that time says that it is down
    abort_s: float = 3.0  # how long a server may take to answer an abort
    max_failures: int = 5  # how often one request may fail under servers before it fails itself
