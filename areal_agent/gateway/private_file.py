"""Writes a file that its owner alone may read. It knows not what is in it."""

import os
from pathlib import Path


def create_private(path: Path, text: str) -> None:
    """Write a line into a file that is not there yet. Raises OSError, also when it is there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")


def replace_private(path: Path, text: str) -> None:
    """Write a line into a file that may be there: who reads it sees all of the text or none. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    create_private(part, text)
    os.replace(part, path)
