"""What a process of processes.py runs to compare answers with math-verify.

Each side of an equation that has no unknown claims a value, which has to be right: both of `2 + 3 = 5`, the second of
`x = 5`. math-verify would take the last side, so that `4 = 5` and `x = 4 = 5` pass for 5.
"""

import re

BOX = re.compile(r"\\boxed\{(.*)\}\s*", re.DOTALL)
EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
SEVERAL = re.compile(r"[,;]|\b(or|and)\b|\\q?quad")
"""Stands between equations: `x = 1, y = 2`."""
SYMBOL = re.compile(
    r"\\(alpha|beta|[gG]amma|[dD]elta|(var)?epsilon|zeta|eta|(var)?[tT]heta|kappa|[lL]ambda|mu|nu|[xX]i|rho|[sS]igma|tau|"
    r"(var)?[pP]hi|chi|[pP]si|[oO]mega|ell)(?![a-zA-Z])"
)
COMMAND = re.compile(r"\\[a-zA-Z]+")


def prepare() -> None:
    is_right("1", "1")  # builds the parser's tables


def answer(said: str, right: str) -> bool | None:
    """Return whether `said` is right; None when `right` itself holds no expression."""
    try:
        return is_right(said, right)
    except Exception:  # the boundary: sympy raises almost anything on what is no mathematics
        return False


def is_right(said: str, right: str) -> bool | None:
    # imported here: pytest reads this file also where the extra `math` is not installed
    from math_verify import parse, verify

    expected = parse(right, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no alarm of its own
    if not expected:
        return None
    claims = [parse(one, parsing_timeout=None) for one in _claims(said, right)]  # pyright: ignore[reportArgumentType]
    return all(verify(expected, claim, timeout_seconds=None) for claim in claims)


def _claims(said: str, right: str) -> list[str]:
    """Return the values that a text claims, each in a box; the text itself where that is one."""
    box = BOX.fullmatch(said)
    sides = EQUALS.split(box[1]) if box else []
    if _has_unknown(sides[0] if sides else ""):
        sides = [] if SEVERAL.search(said) else [side for side in sides if not _has_unknown(side)]
    elif len(sides) == 1:
        sides = []
    if not sides or EQUALS.search(right):
        return [said]
    return [f"\\boxed{{{side.strip()}}}" for side in sides]


def _has_unknown(side: str) -> bool:
    """Return whether a side of an equation has a letter.

    >>> [_has_unknown(side) for side in (r"\\alpha", "AB", r"\\text{Area}", r"25\\pi", r"\\frac{1}{2}")]
    [True, True, True, False, False]
    """
    return re.search("[a-zA-Z]", COMMAND.sub("", SYMBOL.sub("x", side))) is not None
