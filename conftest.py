"""For all tests: the doctest run imports every module, and those of extras that are not installed cannot be.

Their own tests skip themselves.
"""

from importlib.util import find_spec

collect_ignore = [
    f"areal_agent/observe/{name}_run.py" for name in ("wandb", "mlflow", "trackio") if find_spec(name) is None
]
