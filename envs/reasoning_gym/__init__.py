"""The tasks of the package reasoning-gym by name, with their own parameters, levels and scorers (an extra).

tasks.py     `load`: tasks of a name, whose split is decided by their question
workflow.py  `solve`: one answer; `solve_in_turns`: further attempts after the scorer's verdict
gym.py       what uses the package itself, in processes of its own: drawing tasks, and scoring answers
"""
