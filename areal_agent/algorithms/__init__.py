"""The mathematics of a train step as pure functions over torch tensors; no process, no model class, no I/O.

records ─▶ advantages.py ─▶ batching.py ─▶ (a model) ─▶ logprobs.py ─▶ losses.py

config.py names what can be chosen and imports no torch. Docstrings state equation, paper, shapes and normalisation.
"""
