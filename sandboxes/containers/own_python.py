"""A Python for the agent in images that have none, an old one, or not all of one: a copy of the default image's.

It lies in a volume of the engine, which a container of the default image fills once, and is mounted at `PLACE`, where
nobody may write. Its own loader and C library come along, so it runs in any image of the engine's architecture.
"""

from collections.abc import Mapping
from typing import Any

from areal_agent.errors import SandboxError
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE

PLACE = "/.areal-agent-python"
PYTHON = (f"{PLACE}/ready/lib/loader", "--library-path", f"{PLACE}/ready/lib", f"{PLACE}/ready/bin/python3")
FILL = r"""
set -e
cd PLACE
[ ! -d ready ] || exit 0
part=$(hostname)
mkdir -p "$part/bin" "$part/lib"
cp -L /usr/bin/python3 "$part/bin"
cp -r /usr/lib/python3.* "$part/lib"
ldd /usr/bin/python3 /usr/lib/python3.*/lib-dynload/*.so | grep -o '/[^ :]*\.so[^ :]*' | grep -v lib-dynload | sort -u |
    xargs cp -Lt "$part/lib"
mv "$part"/lib/ld-linux* "$part/lib/loader"
mv -T "$part" ready || [ -d ready ]
""".replace("PLACE", PLACE)
"""What is ready appears at once, also when two fill the volume."""


async def python_volume(engine: Engine, labels: Mapping[str, str]) -> str:
    """Return the name of the volume, filling it unless it is full."""
    image = await engine.image(DEFAULT_IMAGE)
    name = f"areal-agent-python-{image.id.removeprefix('sha256:')[:16]}"
    config = {
        "Image": image.id,
        "Entrypoint": ["sh", "-c", FILL],
        "User": "0:0",
        "Labels": dict(labels),
        "HostConfig": {"NetworkMode": "none", "Mounts": [mount_of(name, is_full=False)]},
    }
    if code := await engine.run(config):
        raise SandboxError(f"Python could not be copied from {DEFAULT_IMAGE!r} ({code}); is the engine's disk full?")
    return name


def mount_of(volume: str, *, is_full: bool = True) -> dict[str, Any]:
    return {"Type": "volume", "Source": volume, "Target": PLACE, "ReadOnly": is_full}
