"""An MCP server's tools as those of an OpenAI conversation.

What the server says of a call, errors and time-outs too, is text for the model to read. A server that cannot be started
or is gone raises SandboxError: that is not the model's failure.
"""

import importlib.util
import json
import logging
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from areal_agent import ConfigError, SandboxError
from sandboxes.tools import shortened

logger = logging.getLogger(__name__)
INSTALL = "pip install 'areal-agent[mcp]'"
START_S, CALL_S = 30.0, 60.0


class Tools:
    """The tools of one server; from `open_tools`. `definitions` is the `tools` field of a chat completion request."""

    def __init__(self, client: Any, definitions: list[dict[str, Any]], call_s: float) -> None:
        self.definitions = definitions
        self._client = client
        self._call_s = call_s

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool with the JSON that the model wrote, and return the text for it. Raises SandboxError."""
        from mcp import MCPError  # pyright: ignore  # the extra
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT  # pyright: ignore

        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON: {error}"
        if not isinstance(values, dict):
            return "Error: the arguments are no JSON object"
        try:
            result = await self._client.call_tool(name, values, read_timeout_seconds=self._call_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return f"Error: {name} did not answer within {self._call_s:g} s"
            if error.code == CONNECTION_CLOSED:
                raise SandboxError(f"the MCP server is gone: {error}") from error
            return f"Error: {error}"
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        return shortened(f"{'Error: ' * result.is_error}{chr(10).join(parts)}")


@asynccontextmanager
async def open_tools(server: Mapping[str, Any], *, call_s: float = CALL_S) -> AsyncGenerator[Tools]:
    """Connect to a server: `{url: ...}` for one that runs, or `{command: ..., args: [...], env: {...}}` for its own.

    Of this process's environment its own inherits PATH, HOME and the like alone, and no keys. Use it with `async with`
    inside a workflow. A call takes at most `call_s`. Raises ConfigError where the package is missing or the server is
    not one of the two, SandboxError when it cannot be reached.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"the package 'mcp' is missing; {INSTALL}")
    from mcp import Client, StdioServerParameters, stdio_client  # pyright: ignore

    with tempfile.TemporaryFile("w+", errors="replace") as log:  # what the server says on stderr
        if set(server) == {"url"}:
            place = str(server["url"])
        elif "command" in server and set(server) <= {"command", "args", "env"}:
            args, env = list(server.get("args", ())), server.get("env")
            program = StdioServerParameters(command=server["command"], args=args, env=env)
            place = stdio_client(program, errlog=log)
        else:
            raise ConfigError(f"server is {dict(server)!r}; give its url, or its command with args and env")
        tools: Tools | None = None
        failure: Exception | None = None  # of the workflow: inside, the client's task group would wrap it
        try:
            async with Client(place, read_timeout_seconds=START_S, cache=None) as client:
                tools = Tools(client, [definition_of(tool) for tool in (await client.list_tools()).tools], call_s)
                try:
                    yield tools
                except Exception as error:
                    failure = error
        except Exception as error:  # the boundary: a server that is no MCP server can break anything
            if tools is None:
                log.seek(0)
                said = "".join(log.readlines()[-1:]).strip()
                why = f"{cause_of(error)}{said and f'; it said: {said}'}"
                raise SandboxError(f"the MCP server {dict(server)!r} cannot be reached: {why}") from error
            logger.warning("an MCP server ended badly: %s", cause_of(error))
        if failure is not None:
            raise failure


def cause_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def definition_of(tool: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's format."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
