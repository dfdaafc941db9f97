"""The hostile suite: programs that mean harm, and what must come of each, for any backend.

::

    row.py         a row, the verdict on it
    resources.py   1 to 9: using up what there is
    files.py       10 to 13: files that the host handles
    walls.py       14 to 20: getting out
    grading.py     21 to 24: wrong programs that want full reward
    statuses.py    25: what a program says of its own end

`check` tells what was seen where it was not what is required. A row that is beyond what a backend promises is not run,
since it would do its harm. `python -m sandboxes check` prints the table; a backend's tests call `ROWS`.
"""

from sandboxes.conformance import files, grading, resources, walls
from sandboxes.conformance.row import Row, Verdict, check

ROWS: tuple[Row, ...] = (*resources.RESOURCE_ROWS, *files.ROWS, *walls.ROWS, *grading.ROWS, *resources.STATUS_ROWS)

__all__ = ["ROWS", "Row", "Verdict", "check"]
