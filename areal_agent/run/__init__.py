"""A run: everything that `python -m areal_agent.train` and `python -m areal_agent.eval` build and drive.

loop.py        the main job: the training loop, its signals and its end
run.py         `Run`: builds every part; the asynchronous trainer as a Python API
preflight.py   everything that is checked before a run starts
serving.py     an engine and what rolls out against it
sources.py     where batches come from (its own rollouts, or a gateway elsewhere), and where a run goes on
evaluation.py  evaluations during training
grading.py     `python -m areal_agent.eval`
scores.py      what an evaluation finds, and how two differ
recorded.py    what is recorded of a trainer, so that its steps can be made again
results.py     metrics.jsonl, summary.json and curve.png
"""

from areal_agent.run.run import Run

__all__ = ["Run"]
