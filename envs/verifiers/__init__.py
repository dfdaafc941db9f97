"""Environments of the package verifiers, with its own tasks, tools, turns and rewards.

tasksets.py  `load` and `solve` of tasksets with their harnesses, the package's version 1
tasks.py     `load`: the rows of what `load_environment` makes; its eval dataset is the split `test`
workflow.py  `solve`: one rollout of a row, whose reward is the rubric's
"""
