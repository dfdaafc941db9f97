"""Code rewards: is a program right? Its outputs are compared as plain data, outside of every sandbox.

::

    grade.py        grade: a program and its cases, to a Verdict
    cases.py        what a program is judged by: texts, calls, unit tests
    verdict.py      what is said of it: an outcome a case, a reward between 0 and 1
    checkers.py     when an output is right: exact, white space, floats; plain data against plain data
    custom.py       a checker of the task's own, in a sandbox of its own
    languages.py    how programs of a language are built and run
    programs.py     texts and calls: a process a case
    unit_tests.py   unit tests: they run in one sandbox, the program in another
      remote_program.py, conversation.py    the program there, and talking with it
      bundle.py     a file of inside/ with what it imports
    inside/         what runs inside the sandboxes, beside the program

No expected output is ever in a process that runs the program, nor in the sandbox that holds it. A sandbox that fails
raises `SandboxError`: that is no verdict, and a rollout that ends so is not punished.
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
