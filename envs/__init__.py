"""Environments: each a folder with its tasks, its workflow and its reward, made of public names only.

    calculator/   arithmetic that is too hard for the model's head, with a `python` tool (the quickstart)
    code/         programs to write and to repair, judged by hidden cases in sandboxes

An environment imports `areal_agent` and `sandboxes`; neither of them knows any environment.
"""
