"""docs/recipes.md: its commands can be typed, what it shows is what the runs left, and a run that has ended is not made
again."""

import shlex

import pytest

from areal_agent.config import Config
from areal_agent.sft.config import SftConfig
from benchmarks.recipes import __main__ as recipes

RECIPES = recipes.read_recipes()
COMMANDS = sorted({step["command"] for recipe in RECIPES.values() for step in recipe["steps"]})


@pytest.mark.parametrize("command", [one for one in COMMANDS if "--config" in one])
def test_the_config_of_every_command_is_valid(command, monkeypatch):
    monkeypatch.chdir(recipes.ROOT)
    words = shlex.split(command.replace("\\\n", " "))
    at = words.index("--config")
    config = SftConfig if "areal_agent.sft" in words else Config
    assert config.load(recipes.ROOT / words[at + 1], words[at + 2 :]).model


def test_the_page_shows_the_results_of_every_recipe():
    results = recipes.read_results()
    assert set(results) == set(RECIPES)
    assert recipes.PAGE.read_text() == recipes.page(RECIPES, {name: results[name] for name in RECIPES})
    assert all(outcome.is_verified for outcome in results.values())
    assert recipes.RESULTS.read_text() == recipes.written(results)


def test_a_run_that_ended_is_kept_and_a_command_that_fails_ends_it(tmp_path):
    steps = [{"command": f"mkdir {name} && touch {name}/summary.json", "run": name} for name in ("first", "second")]
    recipes.make({"name": "two", "steps": steps}, None, tmp_path)
    recipes.make({"name": "two", "steps": steps}, None, tmp_path)  # mkdir would fail
    with pytest.raises(SystemExit, match="two: the command failed: mkdir third/fourth"):
        recipes.make({"name": "two", "steps": [{"command": "mkdir third/fourth", "run": "third"}]}, None, tmp_path)
