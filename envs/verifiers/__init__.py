"""Environments of the package verifiers, with its own tasks, tools, turns and rewards.

tasks.py     `load`: the rows of what `load_environment` makes; its eval dataset is the split `test`
workflow.py  `solve`: one rollout of a row, whose reward is the rubric's
"""
