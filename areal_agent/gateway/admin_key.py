"""Where the admin key of a gateway that stands alone comes from. It never says a key, only where it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from areal_agent.errors import ConfigError
from areal_agent.gateway.auth import new_key
from areal_agent.gateway.hosts import LOOPBACK_NAMES
from areal_agent.gateway.private_file import create_private

VARIABLE = "AREAL_AGENT_ADMIN_KEY"
FILE_NAME = "admin_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminKey:
    """A key, and where a person finds it."""

    key: str = field(repr=False)
    source: str
    file: Path | None = None  # that holds it
    is_new: bool = False  # the file is yet to be written: `keep`

    @classmethod
    def obtain(
        cls, *, given: str | None, file: Path | None, environment: Mapping[str, str], host: str, folder: Path
    ) -> Self:
        """The key from the command line, a file or the environment; else its own, in `folder` or to be kept there.

        A gateway that is reached from other machines makes none: its key has to be chosen. Raises ConfigError.
        """
        if given is not None and file is not None:
            raise ConfigError("--admin-key and --admin-key-file both name a key; give one of them")
        if given is not None:
            return cls(key=_checked(given, "--admin-key"), source="as given on the command line")
        if file is not None:
            return cls(key=_read(file), source=f"in {file}", file=file)
        if VARIABLE in environment:
            return cls(key=_checked(environment[VARIABLE], VARIABLE), source=f"in the environment, as {VARIABLE}")
        if host not in LOOPBACK_NAMES:
            raise ConfigError(
                f"--host {host} lets other machines in, and there is no admin key: give --admin-key-file or set "
                f"{VARIABLE}, or listen on 127.0.0.1"
            )
        own, source = folder / FILE_NAME, f"in {folder / FILE_NAME} (mode 0600)"
        if own.exists():
            return cls(key=_read(own), source=source, file=own)
        return cls(key=new_key(), source=source, file=own, is_new=True)

    def keep(self) -> None:
        """Write a key that was made into its file, for its owner alone; once the gateway serves. Raises ConfigError."""
        if self.file is None or not self.is_new:
            return
        try:
            create_private(self.file, self.key)
        except OSError as error:
            raise ConfigError(f"the admin key file {self.file} cannot be written: {error.strerror}") from None


def find_admin_key(file: str | Path | None, environment: Mapping[str, str]) -> str:
    """The key of a gateway elsewhere, for a trainer: from a file, else from the environment. Raises ConfigError."""
    if file is not None:
        if not Path(file).exists():
            raise ConfigError(
                f"rollout.gateway_admin_key_file: there is no {file}; start the gateway first, from this folder, or "
                "name the file that it named when it started"
            )
        return _read(Path(file))
    if VARIABLE not in environment:
        raise ConfigError(
            f"the gateway's admin key is missing; set {VARIABLE}, or rollout.gateway_admin_key_file to the file that "
            "the gateway named when it started"
        )
    return _checked(environment[VARIABLE], VARIABLE)


def _read(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the admin key file {path} cannot be read: {cause}") from None
    return _checked(text.strip(), str(path))


def _checked(key: str, where: str) -> str:
    """A key has to pass through an HTTP header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} holds no usable key: a key is one word of printable ASCII characters")
    return key
