"""Derives from a chat template one that keeps the thinking of earlier answers. It knows no particular template.

The thinking of each answer is handed to the original template as a part of its content, between stand-ins that no
template looks for; in what the original writes they become `<think>` tags again. The result is a template as any
other: it goes with the checkpoint, so that the model is served as it was trained.
"""

from enum import StrEnum


class HistoryThinking(StrEnum):
    """What happens to the thinking of earlier answers when the template would strip it from the history."""

    TEMPLATE = "template"  # the template has its way: the turn forks where the first stripped answer begins
    KEEP = (
        "keep"  # it stays in the prompt: a template derived from the model's writes it, and goes with each checkpoint
    )


_OPEN = "<|thinking-from-here|>"
_CLOSE = "<|thinking-to-here|>"
_CLOSE_ALONE = "<|thinking-to-here-and-nothing-else|>"

STAND_INS = frozenset({_OPEN, _CLOSE, _CLOSE_ALONE})
"""Texts that must not reach a derived template inside a message: they would come out as tags."""

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
{{- written
    | replace('<think>\\n\\n</think>\\n\\n{OPEN}', '{OPEN}')
    | replace('{OPEN}', '<think>\\n')
    | replace('{CLOSE_ALONE}\\n', '\\n</think>\\n\\n')
    | replace('{CLOSE_ALONE}', '\\n</think>\\n\\n')
    | replace('{CLOSE}', '\\n</think>\\n\\n') -}}"""


def keep_template(template: str) -> str:
    """The derived template. One that was derived already stays, and so does one that knows of no thinking to strip."""
    if "</think>" not in template or is_keep_template(template):
        return template
    return _filled(_BEFORE) + template.removesuffix("\n") + _filled(_AFTER)


def is_keep_template(template: str) -> bool:
    """Whether a template was derived by `keep_template`."""
    return template.startswith(_filled(_BEFORE))


def _filled(part: str) -> str:
    return part.replace("{OPEN}", _OPEN).replace("{CLOSE}", _CLOSE).replace("{CLOSE_ALONE}", _CLOSE_ALONE)
