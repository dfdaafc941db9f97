"""The hostile suite: programs that mean harm, and what must come of each, for any backend.

::

    harm.py        what a row is; rows 1 to 20 and 25 to 32: using up resources, hostile files, getting out
    grading.py     rows 21 to 24: wrong programs that want full reward
    tasks.py       rows 33 to 36: the same of work in a task folder

`check` runs a row and reports what was seen if it is not what is required. A row beyond what a backend promises is not
run, since it would do its harm. `python -m sandboxes check` prints the table; the tests of the backends use `ROWS`.
"""

from sandboxes.conformance import grading, harm, tasks
from sandboxes.conformance.harm import Row, Verdict, check

ROWS: tuple[Row, ...] = tuple(sorted((*harm.ROWS, *grading.ROWS, *tasks.ROWS), key=lambda row: row.number))

__all__ = ["ROWS", "Row", "Verdict", "check"]
