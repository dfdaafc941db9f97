"""Tools that let an agent use a sandbox: their OpenAI definitions, and the text that a call returns.

A mistake of the model (an unknown tool, malformed arguments, a failing program) becomes text for it to read. A sandbox
that fails raises SandboxError and ends the rollout.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sandboxes.sandbox import Sandbox
from sandboxes.spec import ExecResult, Status

MAX_CHARACTERS = 8_000
"""The longest text that a call returns; of a longer one, the beginning and the end are kept."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call. All parameters are strings; `act` returns the text that the model reads."""

    name: str
    description: str
    parameters: Mapping[str, str]  # description by name
    act: Callable[["Toolbox", Mapping[str, str]], Awaitable[str]]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool's definition in OpenAI's format."""
        properties = {name: {"type": "string", "description": what} for name, what in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    @property
    def usage(self) -> str:
        """
        >>> BASH.usage
        'call bash with {"command": "..."}'
        """
        return f"call {self.name} with {json.dumps(dict.fromkeys(self.parameters, '...'))}"


class Toolbox:
    """The tools of one rollout. `open_box` opens the sandbox when a call first needs it, for example:

    `Toolbox(lambda: rollout.enter(pool.acquire()))`
    """

    def __init__(self, open_box: Callable[[], Awaitable[Sandbox]], tools: Sequence[Tool] | None = None) -> None:
        self._open_box = open_box
        self._tools = {tool.name: tool for tool in (STANDARD if tools is None else tools)}
        self._box: Sandbox | None = None
        self.submitted: str | None = None  # the program that the model has handed in

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The `tools` field of a chat completion request."""
        return [tool.definition for tool in self._tools.values()]

    async def call(self, name: str, arguments: str) -> str:
        """Run a call and return the text for the model; `arguments` is the JSON that the model wrote."""
        tool = self._tools.get(name)
        if tool is None:
            return f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}"
        values = texts_of(arguments, tuple(tool.parameters))
        return f"Error: {tool.usage}" if values is None else shortened(await tool.act(self, values))

    async def box(self) -> Sandbox:
        """Return the sandbox of this rollout, opening it if needed. For its tools."""
        if self._box is None:
            self._box = await self._open_box()
        return self._box


async def run_bash(toolbox: Toolbox, values: Mapping[str, str]) -> str:
    box = await toolbox.box()
    command = values["command"].replace("\0", "").encode(errors="replace").decode()  # only what an argument can hold
    return said(await box.exec(["bash", "-c", command]))


async def run_python(toolbox: Toolbox, values: Mapping[str, str]) -> str:
    box = await toolbox.box()
    return said(await box.exec_python(values["code"]))


async def read_file(toolbox: Toolbox, values: Mapping[str, str]) -> str:
    box = await toolbox.box()
    try:
        return (await box.read(values["path"])).decode(errors="replace")
    except (OSError, ValueError) as error:  # no such file, or characters that a name cannot hold
        return f"Error: {reason_of(error)}: {values['path']}"


async def write_file(toolbox: Toolbox, values: Mapping[str, str]) -> str:
    box = await toolbox.box()
    data = values["content"].encode(errors="replace")
    try:
        await box.write(values["path"], data)
    except (OSError, ValueError) as error:
        return f"Error: {reason_of(error)}: {values['path']}"
    return f"{len(data)} bytes written to {values['path']}"


def reason_of(error: OSError | ValueError) -> str:
    return (error.strerror or "") if isinstance(error, OSError) else "not a valid path"


async def submit(toolbox: Toolbox, values: Mapping[str, str]) -> str:
    toolbox.submitted = values["code"]
    return "Submitted."


PATH = "Its path in the working directory."
BASH = Tool("bash", "Run a command in bash; what it prints comes back.", {"command": "The command."}, run_bash)
PYTHON = Tool("python", "Run a Python program; what it prints comes back.", {"code": "The program."}, run_python)
READ_FILE = Tool("read_file", "Read a text file.", {"path": PATH}, read_file)
WRITE_FILE = Tool(
    "write_file", "Write a text file, folders included.", {"path": PATH, "content": "The whole text."}, write_file
)
SUBMIT = Tool(
    "submit",
    "Hand in the program. It is judged as it is, and the task is over.",
    {"code": "The whole program."},
    submit,
)
STANDARD = (BASH, PYTHON, READ_FILE, WRITE_FILE, SUBMIT)


def texts_of(arguments: str, names: Sequence[str]) -> dict[str, str] | None:
    """Parse JSON arguments that hold exactly `names`, all strings; None when the model wrote anything else.

    >>> texts_of('{"code": "1"}', ["code"]), texts_of('{"code": 1}', ["code"]), texts_of("{", ["code"])
    ({'code': '1'}, None, None)
    """
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or set(cast(dict[str, Any], values)) != set(names):
        return None
    return cast(dict[str, str], values) if all(isinstance(values[name], str) for name in names) else None


def said(result: ExecResult) -> str:
    """Return what a program printed and, if it failed, how."""
    text = result.stdout.decode(errors="replace")
    if result.status is Status.OK:
        return text.rstrip()
    how = f"Error: {result.status.value}" + (f" (exit code {result.exit_code})" if result.exit_code else "")
    parts = (text.rstrip(), result.stderr.decode(errors="replace").rstrip(), how)
    return "\n".join(part for part in parts if part)


def shortened(text: str) -> str:
    """Return a text with its middle left out if it is long.

    >>> len(shortened("x" * 100_000))
    8033
    """
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - MAX_CHARACTERS} characters are left out]\n{text[-half:]}"
