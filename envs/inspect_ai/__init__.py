"""Tasks of the package inspect_ai, played and scored by its own `eval` (an extra).

tasks.py     `load`: the samples of a task; a fifth of them, by their input, is held out
workflow.py  `solve`: one sample, whose first score is the reward
serve.py     what uses the package itself, in a process of its own, which forks for each rollout
"""
