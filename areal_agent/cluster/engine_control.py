"""The calls by which servers join and leave a run from outside: where they are served, and who finds the key.

Both stand in the run's folder, in files for its owner alone, for as long as the run goes on.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_agent.gateway.auth import new_key
from areal_agent.gateway.engine_servers import EngineServers, serve_engine_servers


@asynccontextmanager
async def open_engine_control(servers: EngineServers, *, url_file: Path, key_file: Path) -> AsyncGenerator[None]:
    """Serve `/rl/engines` until left."""
    key = new_key()
    served = await serve_engine_servers(servers, key)
    try:
        _write_private(key_file, key)
        _write_private(url_file, served.base_url)
        yield
    finally:
        for file in (url_file, key_file):
            file.unlink(missing_ok=True)
        await served.aclose()


def _write_private(path: Path, text: str) -> None:
    """Of a run that was killed there may be one; a reader sees all of the text or none."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")
    os.replace(part, path)
