"""The mathematics of a train step as pure functions over torch tensors, without processes, model classes or I/O.

records ─▶ credit.py ─▶ advantages.py ─▶ batching.py, packing.py ─▶ (a model) ─▶ losses.py

config.py holds the choices and loads the user's own functions; it, credit.py and packing.py import no torch.
Docstrings state equation, paper, shapes and normalisation.
"""
