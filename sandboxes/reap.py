"""What dead owners left on this machine: control groups with their processes, and working folders.

Each provider's keeper and launcher clear up when their host goes. This is for what is left when they were killed too.
"""

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sandboxes.folder import remove_tree
from sandboxes.group_tree import remove_abandoned
from sandboxes.owner import FOLDER_PREFIX, is_abandoned


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaped:
    """How much there was."""

    num_groups: int
    num_folders: int


def reap() -> Reaped:
    """Remove it all. What a living process owns is left alone."""
    return Reaped(num_groups=reap_groups(), num_folders=reap_folders())


def reap_groups() -> int:
    """Control groups, with the processes in them."""
    try:
        return remove_abandoned()
    except FileNotFoundError:
        return 0  # no control groups on this system


def reap_folders() -> int:
    """Working folders."""
    abandoned = [
        folder
        for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")
        if is_abandoned(folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0])
    ]
    for folder in abandoned:
        with contextlib.suppress(PermissionError):  # another user's
            remove_tree(folder)
    return sum(not folder.exists() for folder in abandoned)
