"""The calls by which servers join and leave a run from outside: where they are served, and who finds the key.

Both stand in the run's folder, in files for its owner alone, for as long as the run goes on.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_agent.gateway.auth import new_key
from areal_agent.gateway.engine_servers import EngineServers, serve_engine_servers
from areal_agent.gateway.private_file import replace_private


@asynccontextmanager
async def open_engine_control(servers: EngineServers, *, url_file: Path, key_file: Path) -> AsyncGenerator[None]:
    """Serve `/rl/engines` until left."""
    key = new_key()
    served = await serve_engine_servers(servers, key)
    try:
        replace_private(key_file, key)
        replace_private(url_file, served.base_url)
        yield
    finally:
        for file in (url_file, key_file):
            file.unlink(missing_ok=True)
        await served.aclose()
