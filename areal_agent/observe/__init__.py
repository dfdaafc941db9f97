"""Reports of a run, while it goes on and afterwards.

clock.py     where time goes: activities, busy clocks, spans over several processes
metrics.py   metrics.jsonl: its file, its rows, the metrics of one batch, and what rows add up to
progress.py  shows a run to a person: live in a terminal, as plain lines elsewhere
curve.py     curve.png
trackers.py  TensorBoard and its like, and the section `observe`
"""
