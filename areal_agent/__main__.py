"""`python -m areal_agent` lists the commands. Each command is a module of its own and is run by its own name."""

import sys

from areal_agent import __version__
from areal_agent.command import nearest, run_command
from areal_agent.errors import ConfigError

COMMANDS = {
    "new": "make an environment of your own that runs at once, in a new folder",
    "train": "train a model with an agent workflow: the main job",
    "sft": "fine-tune a model on chats, or on the best rollouts of a run",
    "eval": "grade a model on the held-out tasks of a config",
    "doctor": "examine a config on this machine: what of it works, and what to change",
    "plan": "predict steps an hour for each split of GPUs between rollout and training",
    "view": "read what a run recorded: groups, rewards, fates, and conversations as text",
    "episode": "play recorded episodes again, sample from any of their turns, or grade them anew",
    "ledger": "verify RUN_DIR proves what a run recorded; export RUN_DIR hands it out",
    "gateway": "serve agents that live elsewhere, and lease their rollouts to a trainer",
    "conformance": "prove that every protocol gives the same records, and that templates leave nothing out",
    "storm": "let runs on simulated machines meet thousands of faults, and hold their ledgers against what happened",
    "engine": "serve a model with the embedded inference engine",
    "engine.environment": "make the environment of SGLang or vLLM",
    "models.tiny": "build the quickstart's model",
    "config_reference": "print every key of a config",
}
"""The commands that a person starts, with a line on each."""


def main() -> int:
    given = next((word for word in sys.argv[1:] if word not in ("-h", "--help")), None)
    if given in COMMANDS:
        raise ConfigError(f"{given!r} is a module of its own; run python -m areal_agent.{given} --help")
    if given is not None:
        raise ConfigError(f"there is no command {given!r}; {nearest(given, COMMANDS)}")
    print(_list())
    return 0


def _list() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  python -m areal_agent.{name:<{width}}  {does}" for name, does in COMMANDS.items()]
    sandboxes = f"  python -m {'sandboxes':<{width + len('areal_agent.')}}  sandboxes alone: doctor, check, reap, image"
    return "\n".join(
        [f"areal_agent {__version__} trains agents by reinforcement learning. Each takes --help:", *lines, sandboxes]
    )


if __name__ == "__main__":
    run_command(main)
