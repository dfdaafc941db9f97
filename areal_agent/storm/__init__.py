"""The control plane under faults, on simulated machines: what is promised holds whatever goes wrong, and when.

::

    __init__.py   clocks that a story can replace: imported before the product, which keeps them in defaults
    __main__.py   the command: many stories, and the shortest one of what it finds
    story.py      `tell`: one run from its start to its end, with faults on the way
    faults.py     the kinds of faults; how a story's are drawn, and made fewer
    truth.py      what really happened, and the promises that a ledger is held against
    programs.py   the simulated programs: engines, a trainer, an agent
    cluster.py    a Ray that is not there, and nodes that are lost, cut off and stand still
    machine.py    the loop with a clock of its own; programs that can be killed and stopped

Run, gateways, ledger, admission, fleet, pushes, commits, worker pool and workers are the product's. What is simulated
is behind seams that the product has: the hosts, the engines' client, the time.
"""

import time
from collections.abc import Callable


def _clock(name: str) -> Callable[[], float]:
    return lambda: CLOCKS[name]()


CLOCKS: dict[str, Callable[[], float]] = {name: getattr(time, name) for name in ("monotonic", "perf_counter", "time")}
"""The functions behind those of `time` in this process."""

for _name in CLOCKS:
    setattr(time, _name, _clock(_name))
