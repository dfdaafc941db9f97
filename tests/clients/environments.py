"""The environments that the frameworks of docs/frameworks.md are tried in; `tests/clients/run` is this file's command.

Frameworks whose pins agree share an environment. It lies in $XDG_CACHE_HOME/areal_agent (~/.cache/areal_agent), is made
once, and is made anew when its pins change. .ci/run makes those without `is_full`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Packages with their versions, and the sections of docs/frameworks.md that run with them."""

    name: str
    frameworks: tuple[str, ...]
    packages: tuple[str, ...]
    is_full: bool = False

    @property
    def folder(self) -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache, "areal_agent", f"clients-{self.name}")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_made(self) -> bool:
        made = self.folder / ".made"
        return made.is_file() and made.read_text() == "\n".join(self.packages)

    def make(self) -> None:
        if not self.is_made:
            shutil.rmtree(self.folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            pip = (self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
            subprocess.run([*pip, *self.packages], check=True)
            (self.folder / ".made").write_text("\n".join(self.packages))


ENVIRONMENTS = (
    Environment(
        name="openai-3",
        frameworks=(
            "openai",
            "openai-responses",
            "openai-by-id",
            "anthropic",
            "openai-agents",
            "openai-agents-handoff",
            "langgraph",
            "pydantic-ai",
            "pydantic-ai-anthropic",
        ),
        packages=(
            "openai==3.54.0",
            "anthropic==2.12.0",
            "openai-agents==0.24.0",
            "mcp==2.3.0",
            "langchain==1.4.7",
            "langchain-openai==1.7.3",
            "langgraph==1.2.22",
            "pydantic-ai-slim[anthropic,openai]==2.68.0",
        ),
    ),
    Environment(name="litellm", frameworks=("litellm",), packages=("litellm==1.106.2", "mcp==2.3.0")),
    Environment(
        name="areal",  # what AReaL's uv.lock had at the commit that docs/frameworks.md names
        frameworks=("areal-openai-agents", "areal-anthropic", "areal-langchain"),
        packages=(
            "openai==2.33.0",
            "openai-agents==0.14.8",
            "anthropic==0.97.0",
            "langchain==1.2.15",
            "langchain-openai==1.2.1",
            "httpx-aiohttp==0.2.0",
            "numpy==2.4.6",
        ),
    ),
    Environment(
        name="openai-2",
        frameworks=("smolagents", "smolagents-tools", "autogen", "google-adk", "instructor", "strands", "llama-index"),
        packages=(
            "openai==2.54.0",
            "smolagents[openai]==1.26.0",
            "autogen-agentchat==0.7.5",
            "autogen-ext[openai]==0.7.5",
            "google-adk==2.13.0",
            "litellm==1.106.2",
            "mcp==2.1.1",
            "instructor==1.17.0",
            "strands-agents[openai]==1.62.0",
            "llama-index-core==0.14.25",
            "llama-index-llms-openai-like==0.8.1",
        ),
        is_full=True,
    ),
    Environment(
        name="mcp-1",
        frameworks=("camel", "crewai"),
        packages=("mcp==1.30.0", "camel-ai==0.2.90", "crewai==1.15.30"),
        is_full=True,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/clients/run",
        description="Run workflows of docs/frameworks.md against a gateway, in environments that are made if missing.",
    )
    parser.add_argument("--make", action="store_true", help="only make the environments")
    parser.add_argument("--full", action="store_true", help="all frameworks, also those that .ci/run leaves out")
    parser.add_argument("name", nargs="*", help="a framework, or none for those of .ci/run")
    options = parser.parse_args()
    known = {name for environment in ENVIRONMENTS for name in environment.frameworks}
    if unknown := set(options.name) - known:
        parser.error(f"no framework is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    tests: list[str] = []
    for environment in ENVIRONMENTS:
        is_default = options.full or not (environment.is_full or options.name)
        chosen = [name for name in environment.frameworks if is_default or name in options.name]
        if chosen:
            environment.make()
        tests += [f"{Path(__file__).with_name('test_frameworks.py')}::test_a_workflow[{name}]" for name in chosen]
    return 0 if options.make else pytest.main(["-n", "0", "-m", "full or not full", *tests])


if __name__ == "__main__":
    sys.exit(main())
