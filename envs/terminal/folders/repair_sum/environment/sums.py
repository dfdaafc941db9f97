def add(a: int, b: int) -> int:
    return a - b


def double(a: int) -> int:
    return 2 * a
