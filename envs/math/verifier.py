"""What a process of processes.py runs to compare answers with math-verify."""


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
    found = parse(said, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(expected, found, timeout_seconds=None)
