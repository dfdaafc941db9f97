"""The secret numbers."""

LOWEST, HIGHEST = 1, 64


def load(split: str, seed: int) -> list[dict[str, int | str]]:
    """Return one task for each number. Both splits have them all: every game begins with the same words."""
    return [{"id": f"secret-{secret}", "secret": secret} for secret in range(LOWEST, HIGHEST + 1)]
