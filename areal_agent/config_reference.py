"""Write docs/configuration.md: every key of a config, with the docstrings of the sections as its texts.

Usage: python -m areal_agent.config_reference > docs/configuration.md
"""

import sys
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from areal_agent.command import Parser, run_command
from areal_agent.config import Config
from areal_agent.section import Section, is_named, section_of
from areal_agent.sft.config import SftConfig

HEAD = """# Configuration

Every key of the YAML file that `--config` reads; on the command line `key=value` overrides it, with dots between
section and key (`engine.threads=2`). Unknown keys are errors. This page is made from the sections:
`python -m areal_agent.config_reference > docs/configuration.md`.
"""

SFT = "`python -m areal_agent.sft`"
"""The heading of the keys of a fine-tuning. Its sections that a training run has too are described there."""


def reference() -> str:
    """Return the page, in Markdown."""
    return "\n".join([HEAD, *_table("", Config, "Top level"), *_table("", SftConfig, SFT)]) + "\n"


def _table(prefix: str, section: type[Section], title: str) -> Iterator[str]:
    """Yield the lines of a section's own keys, then those of the sections in it."""
    fields = section.model_fields
    inner = {name: kind for name, field in fields.items() if (kind := section_of(field))}
    yield f"## {title}\n"
    if prefix:
        yield f"{' '.join((section.__doc__ or '').split('>>>')[0].split())}\n"
    yield "| key | default | |\n|---|---|---|"
    for name, field in fields.items():
        default = (
            f"see [{name}](#{_anchor(prefix, name)})" if name in inner and not field.is_required() else _default(field)
        )
        yield f"| `{prefix}{name}` | {default} | {' '.join((field.description or '').split())} |"
    yield ""
    for name, kind in inner.items():
        if section is Config or name not in Config.model_fields:
            keys = f"{prefix}{name}.NAME." if is_named(fields[name]) else f"{prefix}{name}."
            yield from _table(keys, kind, f"{prefix}{name}")


def _anchor(prefix: str, name: str) -> str:
    """Return the anchor of a section's heading. A section named like one at the top level is described there only."""
    return name if name in Config.model_fields else f"{prefix}{name}".replace(".", "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: object = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> int:
    Parser(prog="python -m areal_agent.config_reference", description="Print every key of a config.").parse_args()
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    run_command(main)
