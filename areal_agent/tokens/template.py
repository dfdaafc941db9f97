"""Renders a chat template in a sandbox, and derives a template that keeps the thinking of earlier answers.

`ChatTemplate` renders exactly as transformers does, at a third of the cost: the template is compiled once, and the
messages, which are plain JSON already, are not copied.

`keep_template` wraps any chat template. It hands the thinking of each answer to the original as part of the content,
between markers that no template looks for, and turns the markers into `<think>` tags in the output. `tools_template`
wraps one that leaves out tools, and hands it their definitions, calls and results as text. The results are ordinary
templates that are saved with the checkpoint, so that the model is served as it was trained.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.shield import Shielded, joined
from areal_agent.types import JsonObject

_DICT_METHODS = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset(
    {"first", "last", "index", "index0", "length", "revindex", "revindex0", "previtem", "nextitem"}
)
_MISSING = object()
_NO_OPTIONS: Mapping[str, Any] = {}
_PLAIN_JSON = json.JSONEncoder(ensure_ascii=False)  # constructed once, because construction costs more than use

MAX_KNOWN = 2048
MAX_KNOWN_CHARACTERS = 1000
"""The number and the length of the objects whose text `tojson` remembers: some megabytes at most."""


class ChatTemplate:
    """A compiled template; `variables` are those that it reads. Safe to use from several threads.

    >>> ChatTemplate("{% for m in messages %}{{ bos_token + m.content }}{% endfor %}", {"bos_token": "<s>"}).render(
    ...     [{"role": "user", "content": "hi"}])
    '<s>hi'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            code, self.variables = _compiled(source)
        except (TemplateError, ValueError, RecursionError) as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}; correct chat_template.jinja") from error
        self.source = source
        environment = _environment()
        self._template = Template.from_code(environment, code, {**environment.globals, **_FUNCTIONS})
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> str:
        """Return the text of a conversation. Raises RequestError when the template refuses it."""
        try:
            text = self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **options,
            )
            return "".join((text, "")) if isinstance(text, Shielded) else text
        except Exception as error:  # the template is foreign code that runs on foreign data
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a shortcut for the usual cases: entries of a dict and attributes of a loop."""

    concat = staticmethod(joined)  # keeps the shields of texts that pass through a macro or a block

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_METHODS:
            value = obj.get(attribute, _MISSING)  # pyright: ignore[reportUnknownMemberType]
            return _absent(self.undefined, attribute) if value is _MISSING else value
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@lru_cache(maxsize=MAX_KNOWN)
def _absent(undefined: type[Undefined], attribute: str) -> Undefined:
    """Return what stands for an attribute that a dict lacks. It is the same for every dict, and nothing changes it."""
    return undefined(obj={}, name=attribute)


class _Generation(Extension):
    """`{% generation %}` marks what a model writes; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[CodeType, frozenset[str]]:
    """Return the code of a template, and the variables that it reads. Most renderers of a process have the same one."""
    environment = _environment()
    parsed = environment.parse(source)
    return environment.compile(parsed), frozenset(meta.find_undeclared_variables(parsed))


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
    environment.filters["tojson"] = _JsonTexts().of
    return environment


class _JsonTexts:
    """The filter `tojson`. It keeps the texts of tools and calls, which are rendered again each turn, by object.

    The kept objects stay alive, so no other object gets their id, and nobody changes what was given to a template.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}  # by id: the object and its text

    def of(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if ensure_ascii or indent is not None or separators or sort_keys:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        text = _PLAIN_JSON.encode(value)
        if isinstance(value, dict) and len(text) <= MAX_KNOWN_CHARACTERS:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[id(value)] = value, text
        return text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_FUNCTIONS: Mapping[str, object] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class HistoryThinking(StrEnum):
    """The treatment of earlier answers' thinking that the template would strip from the history."""

    TEMPLATE = "template"  # the template strips it, and the turn forks where the first stripped answer begins
    KEEP = "keep"  # it stays in the prompt; a derived template writes it and is saved with each checkpoint


_OPEN = "<|thinking-from-here|>"
_CLOSE = "<|thinking-to-here|>"
_CLOSE_ALONE = "<|thinking-to-here-and-nothing-else|>"

MARKERS = frozenset({_OPEN, _CLOSE, _CLOSE_ALONE})
"""Markers that no message may bring into a derived template, because they would come out as tags."""

_BEFORE = """\
{%- set kept = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.role != 'assistant' -%}
{%- set kept.messages = kept.messages + [message] -%}
{%- else -%}
{%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
{%- set said = message.content if message.content is string else '' -%}
{%- if not thought and '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] -%}
{%- set said = said.split('</think>')[1:] | join('</think>') -%}
{%- endif -%}
{%- set thought = thought.strip('\\n') -%}
{%- set said = said.lstrip('\\n') -%}
{%- if thought -%}
{%- set close = '{CLOSE}' if said else '{CLOSE_ALONE}' -%}
{%- set message = dict(
    message.items() | rejectattr(0, 'in', ['content', 'reasoning_content', 'reasoning', 'thinking']),
    content='{OPEN}' + thought + close + said
) -%}
{%- endif -%}
{%- set kept.messages = kept.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = kept.messages -%}
{%- set written +%}"""

_AFTER = """\
{%+ endset -%}
{{- (written ~ '')
    | replace('<think>\\n\\n</think>\\n\\n{OPEN}', '{OPEN}')
    | replace('{OPEN}', '<think>\\n')
    | replace('{CLOSE_ALONE}\\n', '\\n</think>\\n\\n')
    | replace('{CLOSE_ALONE}', '\\n</think>\\n\\n')
    | replace('{CLOSE}', '\\n</think>\\n\\n') -}}"""


def keep_template(template: str) -> str:
    """Return the derived template, or `template` itself if it is derived already or has no thinking."""
    if "</think>" not in template or is_keep_template(template):
        return template
    return _filled(_BEFORE) + template.removesuffix("\n") + _filled(_AFTER)


def is_keep_template(template: str) -> bool:
    """Return whether a template was derived by `keep_template`."""
    return template.startswith(_filled(_BEFORE))


def _filled(part: str) -> str:
    return part.replace("{OPEN}", _OPEN).replace("{CLOSE}", _CLOSE).replace("{CLOSE_ALONE}", _CLOSE_ALONE)


_TOOLS = "{#- tools as text -#}"  # how a derived template begins

_DEFINITIONS = """\
{%- set told = namespace(text='') -%}
{%- if tools -%}
{%- set told.text = 'These are the tools, one in each line:' -%}
{%- for tool in tools -%}{%- set told.text = told.text + '\\n' + (tool | tojson) -%}{%- endfor -%}
{%- set told.text = told.text + '\\nTo call one, write its name and arguments like this:\\n' + EXAMPLE -%}
{%- set first = messages[0] if messages and messages[0].role == 'ROLE' else none -%}
{%- if first -%}{%- set told.text = first.content + '\\n\\n' + told.text -%}{%- endif -%}
{%- set messages = [{'role': 'ROLE', 'content': told.text}] + (messages[1:] if first else messages) -%}
{%- endif -%}
"""

_CALLS = """\
{%- set told = namespace(messages=[], text='') -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- set told.text = message.content or '' -%}
{%- for call in message.tool_calls -%}
{%- set arguments = call.function.arguments -%}
{%- set arguments = arguments if arguments is string else arguments | tojson -%}
{%- set begin = '<tool_call>NEWLINE{"name": ' + (call.function.name | tojson) + ', "arguments": ' -%}
{%- set told.text = told.text + ('\\n' if told.text else '') + begin + arguments + '}NEWLINE</tool_call>' -%}
{%- endfor -%}
{%- set message = dict(message.items() | rejectattr(0, 'in', ['content', 'tool_calls']), content=told.text) -%}
{%- endif -%}
{%- set told.messages = told.messages + [message] -%}
{%- endfor -%}
{%- set messages = told.messages -%}
"""

_RESULTS = """\
{%- set told = namespace(messages=[], text='') -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- set told.text = told.text + '\\n' if told.text else '' -%}
{%- set told.text = told.text + '<tool_response>\\n' + message.content + '\\n</tool_response>' -%}
{%- endif -%}
{%- if told.text and (loop.last or loop.nextitem.role != 'tool') -%}
{%- set told.messages = told.messages + [{'role': 'user', 'content': told.text}] -%}
{%- set told.text = '' -%}
{%- endif -%}
{%- if message.role != 'tool' -%}{%- set told.messages = told.messages + [message] -%}{%- endif -%}
{%- endfor -%}
{%- set messages = told.messages -%}
"""


def tools_template(
    template: str, *, example: str | None, newline: str | None, has_results: bool, has_system: bool
) -> str:
    """Return a template that also writes what this one leaves out of tools, as Hermes' models have it.

    `example`: a call, for a template that does not write definitions; they go into the system message, or where the
    template has none into the first user's. `newline`: within calls, for one that writes no calls. `has_results`: it
    writes their results. Calls of other formats than Hermes' are not written.
    """
    before = ""
    if example is not None:
        role = "system" if has_system else "user"
        before += _DEFINITIONS.replace("ROLE", role).replace("EXAMPLE", json.dumps(example, ensure_ascii=False))
    if newline is not None:
        before += _CALLS.replace("NEWLINE", newline.replace("\n", "\\n"))
    if not has_results:
        before += _RESULTS
    return _TOOLS + before + template if before and not template.startswith(_TOOLS) else template
