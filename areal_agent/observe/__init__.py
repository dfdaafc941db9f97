"""Reports of a run, while it goes on and afterwards.

clock.py          where time goes: activities, busy clocks, spans over several processes
metrics.py        metrics.jsonl: its file, its rows, and what they add up to
batch_metrics.py  the metrics of one batch
progress.py       shows a run to a person: live in a terminal, as plain lines elsewhere
curve.py          curve.png
trackers.py       TensorBoard and its like; *_run.py has one each
logging.py        one log file per process, and its peak memory
config.py         the section `observe`
"""
