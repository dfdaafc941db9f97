"""What a ledger allows to be done again.

training.py    a run's train steps, compared with what the run made
comparison.py  the same batches with other settings, side by side
"""
