"""Paths within a sandbox: relative to its working directory, and never out of it. It opens nothing."""

import errno
from pathlib import PurePosixPath


def relative_parts(path: str) -> tuple[str, ...]:
    """The names of a path within a working directory; PermissionError for one that leads out of it, or nowhere.

    >>> relative_parts("./data/input.txt")
    ('data', 'input.txt')
    """
    parts = folder_parts(path)
    if not parts:
        raise _refusal(path)
    return parts


def folder_parts(path: str) -> tuple[str, ...]:
    """As `relative_parts`, of a folder: the working directory itself is one."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise _refusal(path)
    return parts


def _refusal(path: str) -> PermissionError:
    return PermissionError(errno.EPERM, "give a path in the working directory, relative and without '..'", path)
