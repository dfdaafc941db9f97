"""Code rewards: is a program right? Its outputs are compared as plain data, outside of every sandbox.

::

    grade.py        grade: takes a program and its cases, gives a Verdict; texts and calls
    verdict.py      the cases (StdinCase, CallCase, UnitTests), and the verdict: an outcome per case, a reward
    checkers.py     when an output is right: exact, by lines, close numbers, or a checker of the task's own
    languages.py    how programs of a language are built and run; bundles of files of inside/
    unit_tests.py   unit tests, which pytest runs in one sandbox while the program runs in another
    inside/         code that is sent to the sandboxes, beside a program or its tests; what it reports is not trusted

No expected output is ever in a process that runs the program, nor in the sandbox that holds it. A sandbox that fails
raises `SandboxError`, which is not a verdict: the rollout is not punished.
"""

from sandboxes.judge.checkers import CloseNumbers, CustomChecker, Exact, SameLines
from sandboxes.judge.grade import grade
from sandboxes.judge.languages import LANGUAGES, Language
from sandboxes.judge.verdict import CallCase, CaseVerdict, Outcome, StdinCase, UnitTests, Verdict

__all__ = [
    "LANGUAGES",
    "CallCase",
    "CaseVerdict",
    "CloseNumbers",
    "CustomChecker",
    "Exact",
    "Language",
    "Outcome",
    "SameLines",
    "StdinCase",
    "UnitTests",
    "Verdict",
    "grade",
]
