"""The hostile suite: programs that mean harm, and what must come of each, for any backend.

::

    row.py         a row, and the verdict on it
    harm.py        rows 1 to 20: using up resources, hostile files, getting out; row 25: faking one's own end
    grading.py     rows 21 to 24: wrong programs that want full reward

`check` runs a row and reports what was seen if it is not what is required. A row beyond what a backend promises is not
run, since it would do its harm. `python -m sandboxes check` prints the table; the tests of the backends use `ROWS`.
"""

from sandboxes.conformance import grading, harm
from sandboxes.conformance.row import Row, Verdict, check

ROWS: tuple[Row, ...] = tuple(sorted((*harm.ROWS, *grading.ROWS), key=lambda row: row.number))

__all__ = ["ROWS", "Row", "Verdict", "check"]
