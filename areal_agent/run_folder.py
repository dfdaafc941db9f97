"""The folder of a run: which file lies where, and who may make or reopen it. It knows nothing of their contents.

config.yaml  ledger.sqlite  metrics.jsonl  checkpoints/  logs/  curve.png  summary.json
engines_url  admin_key     (while it goes on)
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from areal_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. The folder is private to its owner: it holds prompts, answers and key hashes."""

    path: Path

    @classmethod
    def choose(cls, run_dir: str | None, name: str) -> Self:
        """The folder that a new run will use: `run_dir`, or the first free `runs/<name>`, `runs/<name>-2`, ...

        Raises ConfigError when `run_dir` is taken or cannot be made. Makes nothing that stays.
        """
        if run_dir is None:
            number = 1
            path = Path("runs") / name
            while path.exists():
                number += 1
                path = Path("runs") / f"{name}-{number}"
            return cls(path)
        path = Path(run_dir)
        if not run_dir or (path.exists() and not path.is_dir()):
            raise ConfigError(f"run_dir {run_dir!r} is no folder; name one that does not exist yet")
        if path.exists() and any(path.iterdir()):
            raise ConfigError(
                f"run_dir {run_dir!r} exists and is not empty; go on with it by --resume {run_dir}, or name another"
            )
        require_room(path)
        return cls(path)

    @classmethod
    def reopen(cls, run_dir: str) -> Self:
        """The folder of a run to resume. Raises ConfigError when it is none."""
        folder = cls(Path(run_dir))
        for needed in (folder.config, folder.ledger):
            if not needed.is_file():
                raise ConfigError(f"--resume {run_dir!r}: there is no {needed.name}, so this is no run folder")
        return folder

    def remove(self) -> None:
        """Undo `make` for a run that could not be started."""
        shutil.rmtree(self.path, ignore_errors=True)

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            self.checkpoints.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir {str(self.path)!r} cannot be made: {error.strerror}") from None

    @property
    def is_completed(self) -> bool:
        """Whether the run has ended as it should, by its summary."""
        try:
            summary: object = json.loads(self.summary.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(summary, dict) and cast(dict[str, object], summary).get("status") == "completed"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def engines_url(self) -> Path:
        """Where `/rl/engines` is served, while the run goes on."""
        return self.path / "engines_url"

    @property
    def admin_key(self) -> Path:
        """What these calls take."""
        return self.path / "admin_key"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


def require_room(path: Path) -> None:
    """Raise ConfigError unless a folder can be made there: that is tried, for permissions do not always tell."""
    parent = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".areal-agent-", dir=parent)).rmdir()
    except OSError as error:
        raise ConfigError(
            f"run_dir {str(path)!r} cannot be made: nothing can be written to {str(parent)!r} ({error.strerror}); name "
            "another folder"
        ) from None
