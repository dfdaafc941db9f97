"""Where a run's numbers go besides metrics.jsonl: trackers of the field, each an extra of its own.

::

    rows ──▶ background.py: a queue and a thread a tracker ──▶ tracker.py: the protocol
             a tracker that fails is told once and stops nothing  ├── tensorboard_run.py
                                                                  ├── wandb_run.py
    choice.py: from a name in the config to a tracker             ├── mlflow_run.py
                                                                  └── trackio_run.py
"""
