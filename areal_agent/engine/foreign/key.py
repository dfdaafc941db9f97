"""Makes a server demand a key. For launchers, which run in environments without areal_agent.

SGLang and vLLM have keys of their own, but SGLang writes its key to the log, and vLLM lets anybody load weights. This
file uses only the standard library, so that a launcher can load it by its path.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "AREAL_AGENT_ENGINE_KEY"  # as address.py has it
OPEN = "/health"
REFUSAL = f'{{"error": {{"message": "this engine demands the key that it was started with: set {KEY_VARIABLE}"}}}}'


class KeyDemanded:
    """ASGI middleware: whoever asks for anything but `/health` has to show the key that the environment has."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope.get("path") == OPEN or hmac.compare_digest(shown, self._expected):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSAL.encode()})
