"""Which host a URL names: whether it is this machine."""

import socket
from urllib.parse import urlsplit

from areal_agent.errors import ConfigError


def check_this_host(url: str, what: str) -> None:
    """Raise ConfigError unless `url` leads to this machine: what lies in its memory can be read there."""
    name = urlsplit(url).hostname or ""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"{what} = {url}: the host {name!r} cannot be found ({error}); check the name") from None
    if not any(_is_own(address) for address in addresses):
        raise ConfigError(
            f"{what} = {url}: {name!r} is another machine, and weights are handed over in shared memory; run the "
            "trainer on the machine of the engine"
        )


def _is_own(address: str) -> bool:
    """A socket can be bound to the addresses of this machine only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
