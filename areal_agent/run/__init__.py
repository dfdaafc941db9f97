"""A run: everything that `python -m areal_agent.train` builds and drives.

`Run` is the asynchronous trainer as a Python API; `loop` is the main job over it.
"""

from areal_agent.run.run import Run

__all__ = ["Run"]
