"""`grade`: the reward that a program earns on its cases, with any pool."""

from areal_agent.errors import SandboxError
from sandboxes import Isolation, Limits, Pool, SandboxSpec
from sandboxes.judge.checkers import Checker, CustomChecker, SameLines
from sandboxes.judge.languages import PYTHON, Language, language_of
from sandboxes.judge.programs import ProgramJudge
from sandboxes.judge.unit_tests import judge_unit_tests
from sandboxes.judge.verdict import Cases, UnitTests, Verdict

SAME_LINES = SameLines()
ANY_BOX = SandboxSpec()


async def grade(
    code: str,
    cases: Cases,
    *,
    pool: Pool,
    language: str | Language = "python",
    checker: Checker | CustomChecker = SAME_LINES,
    limits: Limits | None = None,
    spec: SandboxSpec = ANY_BOX,
    stop_early: bool = False,
) -> Verdict:
    """Run a program against cases, in fresh sandboxes of `pool` that start as `spec` says.

    `limits` apply to one case (None: the pool's); a case may have its own. With `stop_early` the cases after the first
    failure are skipped.

    Raises ValueError for cases that cannot be judged. Raises SandboxError when a sandbox fails, lacks the language, or
    would hold expected outputs where others can read them. Neither says anything about the program.
    """
    language = language_of(language)
    if isinstance(cases, UnitTests) or isinstance(checker, CustomChecker):
        _require_walls(pool)
    if isinstance(cases, UnitTests):
        if language is not PYTHON:
            raise ValueError(f"unit tests are judged in Python, not in {language.name}; give StdinCase or CallCase")
        return await judge_unit_tests(code, cases, pool=pool, spec=spec, limits=limits, stop_early=stop_early)
    if not cases:
        raise ValueError("cases is empty; give at least one")
    judge = ProgramJudge(
        pool=pool, spec=spec, language=language, code=code, checker=checker, limits=limits, stop_early=stop_early
    )
    return await judge.judge(cases)


def _require_walls(pool: Pool) -> None:
    """Refuse backends without walls: a program could read tests and checkers, which hold what is expected."""
    found = pool.capabilities()
    if not found.isolation.covers(Isolation.NAMESPACES):
        raise SandboxError(
            f"unit tests and custom checkers need walls, but the {found.backend} backend gives only "
            f"{found.isolation.value!r}: a program could read them; use a backend that isolates, or texts and calls"
        )
