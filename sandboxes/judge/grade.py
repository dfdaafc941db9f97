"""`grade`: what a program earns, by the cases it is given. It knows no backend: any pool will do."""

from sandboxes import Limits, Pool, SandboxSpec
from sandboxes.judge.cases import Cases
from sandboxes.judge.checkers import Checker, SameLines
from sandboxes.judge.custom import CustomChecker
from sandboxes.judge.languages import Language, language_of
from sandboxes.judge.programs import ProgramJudge
from sandboxes.judge.verdict import Verdict

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

    `limits` are those of one case (None: the pool's); a case may have its own. `stop_early` leaves out the cases behind
    the first that fails.

    Raises ValueError for cases that cannot be judged, and SandboxError when a sandbox fails or has not the language:
    neither says anything of the program.
    """
    if not cases:
        raise ValueError("cases is empty; a program that is compared with nothing earns nothing: give at least one")
    judge = ProgramJudge(
        pool=pool,
        spec=spec,
        language=language_of(language),
        code=code,
        checker=checker,
        limits=limits,
        stop_early=stop_early,
    )
    return await judge.judge(cases)
