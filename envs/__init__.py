"""Environments: each is a folder with its tasks, its workflow and its reward, written with public names only.

    calculator/   arithmetic that is too hard for the model's head, with a `python` tool (the quickstart)
    number_game/  a game of several turns (the tutorial)
    code/         programs to write and to repair, judged by hidden cases in sandboxes
    math/         mathematical problems, whose answers math-verify judges
    terminal/     tasks as benchmarks ship them, in containers
    templates/    what `python -m areal_agent.new` copies

An environment imports `areal_agent` and `sandboxes`, never the other way round.
"""
