"""The house stands: imports run downward only, and packages of one row never import each other.

1. no module imports a layer above its own, nor a sibling in its row; 2. torch stays in the rooms that need it;
3. sandboxes knows nothing of areal_agent but its errors; 4. areal_agent imports neither envs nor sandboxes nor
examples; 5. `import areal_agent` loads none of torch, transformers, openai; and the main
process of a run no torch; 6. there is no import cycle.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

LAYERS = [
    ["types", "errors", "protocols", "section"],
    ["observe", "callback", "command", "files", "process", "staleness", "dtype", "threads"],
    ["images"],
    ["ledger", "engine", "tokens", "algorithms", "models"],
    ["gateway", "weights"],
    ["rollout", "trainer"],
    ["cluster"],
    ["config", "testing"],
    ["run", "sft", "config_reference"],
    ["replay"],
    ["__main__", "new", "train", "eval", "view", "episode", "doctor", "conformance", "storm"],
    ["plan"],
]
FACADE = "areal_agent"  # __init__.py: the public names, from wherever they live
COMMANDS = {
    "engine.__main__",
    "ledger.__main__",
    "models.tiny",
    "trainer.__main__",
}  # they import what a command may import
TORCH_ROOMS = (
    "algorithms",
    "trainer",
    "weights",
    "models",
    "engine.embedded",
    "engine.__main__",
    "engine.foreign.reception",
    "engine.sglang.launcher",
    "engine.sglang.scheduler_extension",
    "engine.vllm.worker_extension",
)


def modules(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports_of(path: Path) -> set[str]:
    """The dotted names a file imports, wherever in the file; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str:
    return module.split(".")[1]


def layer_of(room: str) -> int:
    return next(number for number, row in enumerate(LAYERS) if room in row)


OURS = modules("areal_agent")


PACKAGES = {path.name for path in (ROOT / "areal_agent").iterdir() if path.is_dir()}


def test_imports_run_downward() -> None:
    faults: list[str] = []
    for module in OURS.keys() - {FACADE}:
        room = room_of(module)
        layer = layer_of("__main__" if module.removeprefix("areal_agent.") in COMMANDS else room)
        for name in imports_of(OURS[module]):
            is_name_of_facade = name.count(".") == 1 and name not in OURS
            if not name.startswith("areal_agent.") or is_name_of_facade or (other := room_of(name)) == room:
                continue
            if layer_of(other) > layer:
                faults.append(f"{module} imports {name}, which is above it")
            elif layer_of(other) == layer and {room, other} <= PACKAGES:
                faults.append(f"{module} imports {name} in its own row")
    assert faults == []


def test_torch_stays_in_its_rooms() -> None:
    users = {module for module in OURS if any(name.split(".")[0] == "torch" for name in imports_of(OURS[module]))}
    assert users
    assert [one for one in users if not one.removeprefix("areal_agent.").startswith(TORCH_ROOMS)] == []


def test_sandboxes_stand_alone() -> None:
    for module, path in modules("sandboxes").items():
        foreign = {name for name in imports_of(path) if name.startswith(("areal_agent", "envs", "examples"))}
        assert all(name.startswith("areal_agent.errors") for name in foreign), f"{module}: {foreign}"


def test_areal_agent_imports_no_environment() -> None:
    for module, path in OURS.items():
        foreign = {
            name for name in imports_of(path) if name.split(".")[0] in ("envs", "sandboxes", "examples", "tests")
        }
        assert not foreign, f"{module}: {foreign}"


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(module) for module in OURS if module != FACADE}
    assert rooms == {room for row in LAYERS for room in row}


IMPORTS = """
import sys
import areal_agent
print({"torch", "transformers", "openai"} & set(sys.modules))
import areal_agent.trainer.client, areal_agent.trainer.checkpoint, areal_agent.weights.push
print({"torch", "transformers"} & set(sys.modules))
from transformers import PreTrainedTokenizerFast  # older ones load torch themselves
given = set(sys.modules)
import areal_agent.run.loop, areal_agent.run.evaluation, areal_agent.doctor.examination
print({"torch"} & (set(sys.modules) - given))
"""
"""The package, the trainer's client, and the main process of a run."""


def test_what_an_import_does_not_load() -> None:
    out = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.split("\n") == ["set()", "set()", "set()", ""]


def test_no_import_cycle() -> None:
    graph = {module: {name for name in imports_of(path) if name in OURS} - {module} for module, path in OURS.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
