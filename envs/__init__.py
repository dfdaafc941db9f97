"""Environments: each is a folder with its tasks, its workflow and its reward, written with public names only.

    calculator/   arithmetic that is too hard for the model's head, with a `python` tool (the quickstart)
    code/         programs to write and to repair, judged by hidden cases in sandboxes

An environment imports `areal_agent` and `sandboxes`, never the other way round.
"""
