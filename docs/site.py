"""What mkdocs.yml hooks into mkdocs: where pages lie, and the pages that are made from the code.

A page has the path on the site that it has in the repository. So a relative link that works on GitHub works here, and
READMEs of environments and examples are pages where they are. Files that a page links to are copied beside it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from areal_agent.__main__ import COMMANDS
from areal_agent.gateway.openapi import CALLS, KEYS, TRAINER_CALLS, openapi_document

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "sandboxes/**/*.md", "envs/*/README.md", "examples/*/README.md")
LINK = re.compile(r"\]\(([^)#\s]+)")
DOCTEST = re.compile(r"(?:^[ ]*>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)
SANDBOXES = ("sandboxes", "sandboxes doctor", "sandboxes check", "sandboxes image", "sandboxes reap")


class Doctests(griffe.Extension):
    """Shows the examples of a docstring as code, and the `::` before a drawing as one colon or none."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"(?m)^::\n", "", obj.docstring.value).replace("::\n", ":\n")
            obj.docstring.value = DOCTEST.sub(lambda found: f"```python\n{found[0].rstrip()}\n```\n", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what mkdocs found in docs/ by the repository's pages and what they link to, and add the made ones."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked = {target for page in pages for target in _targets(page)} - {*pages}
    for path in [*pages, *sorted(linked)]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "docs/commands.md", content=commands_page()))
    files.append(File.generated(config, "docs/http.md", content=http_page()))
    return files


def _targets(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    for target in LINK.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / target))
        if path.is_file() and path.is_relative_to(ROOT):
            yield path


def commands_page() -> str:
    """Return the page of all commands, in the words of their `--help`."""
    modules = [f"areal_agent.{name}" for name in COMMANDS] + [*SANDBOXES, "sandboxes.tasks.harbor"]
    with ThreadPoolExecutor(2) as threads:
        helps = list(threads.map(_help, modules))
    parts = [f"## {module}\n\n```text\n{text}```\n" for module, text in zip(modules, helps, strict=True)]
    return "\n".join(["# Commands\n\nEach is `python -m NAME`; this is its `--help`.\n", *parts])


def _help(module: str) -> str:
    environment = {**os.environ, "COLUMNS": "110"}
    command = [sys.executable, "-m", *module.split(), "--help"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def http_page() -> str:
    """Return the page of the gateway's HTTP calls, from the document that it serves as /openapi.json."""
    document = openapi_document(is_leased_from=True)
    schemas: Mapping[str, Any] = document["components"]["schemas"]
    lines = [
        "# HTTP calls of the gateway\n",
        "`GET /openapi.json` of a running gateway is the whole of it, for machines. Paths under `/v1` also work "
        "without it. [The gateway](gateway.md) says what its parameters do.\n",
        *(f"- `{name}`: {text}" for name, text in KEYS.items()),
    ]
    for call in (*CALLS, *TRAINER_CALLS):
        method = (call.method or ("get" if call.body is None else "post")).upper()
        lines.append(f"\n## {method} {call.path}\n\n{call.summary}" + (f" Key: `{call.key}`." if call.key else ""))
        if call.body is not None:
            lines += ["\n| field | type | |\n|---|---|---|", *_fields(schemas[call.body.__name__])]
    return "\n".join(lines) + "\n"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row for each field of a body."""
    for name, field in schema.get("properties", {}).items():
        need = " (required)" if name in schema.get("required", ()) else ""
        yield f"| `{name}`{need} | {_type(field)} | {' '.join(field.get('description', '').split())} |"


def _type(field: Mapping[str, Any]) -> str:
    """Return a field's type in a word or two."""
    if "anyOf" in field or "oneOf" in field:
        kinds = [_type(kind) for kind in field.get("anyOf", field.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "`" + field["$ref"].rpartition("/")[2].rpartition("__")[2] + "`"
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
