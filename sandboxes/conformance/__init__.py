"""The hostile suite: programs that mean harm, and what must come of each, for any backend.

::

    row.py         a row, and the verdict on it
    resources.py   rows 1 to 9: using up resources; row 25: faking one's own end
    files.py       rows 10 to 13: files that the host handles
    walls.py       rows 14 to 20: getting out
    grading.py     rows 21 to 24: wrong programs that want full reward

`check` runs a row and reports what was seen if it is not what is required. A row beyond what a backend promises is not
run, since it would do its harm. `python -m sandboxes check` prints the table; the tests of the backends use `ROWS`.
"""

from sandboxes.conformance import files, grading, resources, walls
from sandboxes.conformance.row import Row, Verdict, check

ROWS: tuple[Row, ...] = (*resources.RESOURCE_ROWS, *files.ROWS, *walls.ROWS, *grading.ROWS, *resources.STATUS_ROWS)

__all__ = ["ROWS", "Row", "Verdict", "check"]
