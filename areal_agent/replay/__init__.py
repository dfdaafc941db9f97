"""What a ledger allows to be done again.

training.py    a run's train steps, compared with what the run made
comparison.py  the same batches with other settings, side by side
saved.py       a run's folder for episodes: its config, its sessions, their tasks and workflow
answers.py     recorded answers in the place of an engine, and fresh ones after a turn
stage.py       a workflow behind a gateway whose engine is a record
turns.py       recorded turns as tasks of a new run: `tasks: areal_agent.replay:turns`
"""

from areal_agent.replay.turns import go_on, turns

__all__ = ["go_on", "turns"]
