"""`python -m areal_agent.new NAME` makes an environment that runs at once: a folder of a user's own, to be rewritten.

A template is one or more packages of `envs`, whose files are copied in order; of two with the same name the last one
stays. Modules of a template import each other relatively, so only `*.md` and `*.yaml` hold the name, as `{name}`.
"""

import importlib.resources
import importlib.util
import keyword
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from areal_agent.command import Parser, nearest, run_command
from areal_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of environment."""

    does: str
    packages: tuple[str, ...]  # below `envs`, which is not imported; `templates.common` follows
    needs: str = ""  # packages to install


TEMPLATES = {
    "single": Template("one question, one answer", ("templates.single",)),
    "tools": Template("a tool, which is a function of the workflow", ("templates.tools",)),
    "multi_turn": Template("a game of several turns (the tutorial's)", ("number_game",)),
    "code": Template("programs, judged in sandboxes", ("templates.code",)),
    "openai_agents": Template(
        "the tool in OpenAI's Agents SDK", ("templates.tools", "templates.openai_agents"), "openai-agents"
    ),
    "langgraph": Template(
        "the tool in LangGraph", ("templates.tools", "templates.langgraph"), "langgraph langchain-openai"
    ),
}


def make(name: str, template: str, parent: Path) -> Path:
    """Make the folder `parent/name`, which appears complete or not at all. Raises ConfigError."""
    check_name(name)
    if template not in TEMPLATES:
        raise ConfigError(f"--template {template!r}: there is no such template; {nearest(template, TEMPLATES)}")
    target = parent / name
    try:
        if target.exists():
            raise ConfigError(f"{str(target)!r} exists already; remove it, or choose another name")
        if is_taken(name):
            raise ConfigError(f"the name {name!r} belongs to a module that is installed here; choose another name")
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}-") as temporary:
            made = Path(temporary) / name
            made.mkdir()
            for package in (*TEMPLATES[template].packages, "templates.common"):
                copy(importlib.resources.files(f"envs.{package}"), made, name)
            shutil.move(made, target)
    except OSError as error:
        raise ConfigError(f"cannot make {str(target)!r}: {error.strerror}; make it in another folder") from error
    return target


def check_name(name: str) -> None:
    """Raise ConfigError unless Python can import a package of this name."""
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        reason = "a word of the language" if keyword.iskeyword(name) else "not a Python identifier"
        raise ConfigError(
            f"NAME is {name!r}, {reason}, and Python has to import it; use letters, digits and underscores, "
            "for example my_game"
        )


def is_taken(name: str) -> bool:
    """Return whether `import name` finds a module already, which the new folder would hide or be hidden by."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, as __main__
        return True


def copy(folder: Traversable, target: Path, name: str) -> None:
    """Copy the files of a template's folder into `target`."""
    for file in folder.iterdir():
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8")
        if file.name.endswith((".md", ".yaml")):
            text = text.replace("{name}", name)
        target.joinpath(f"{name}.yaml" if file.name == "config.yaml" else file.name).write_text(text, encoding="utf-8")


def main() -> int:
    parser = Parser(
        prog="python -m areal_agent.new",
        description="Make an environment that runs at once, in a new folder here: workflow, tasks, reward, "
        "demonstrations for the tiny model, config, test and README.",
    )
    parser.add_argument("name", metavar="NAME", help="the name of the folder and of its Python package")
    kinds = "; ".join(f"{name}: {template.does}" for name, template in TEMPLATES.items())
    parser.add_argument("--template", default="single", help=f"single by default. {kinds}")
    args = parser.parse_args()
    folder = make(args.name, args.template, Path())
    print(f"made {folder}/: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if needs := TEMPLATES[args.template].needs:
        print(f"it needs: python -m pip install {needs}")
    print(
        f"python -m pytest {folder}    # tests it with a scripted model\n"
        f"python -m areal_agent.train --config {folder}/{folder}.yaml    # a tiny model learns it"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
