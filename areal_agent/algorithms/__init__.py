"""The mathematics of a train step as pure functions over torch tensors; no process, no model class, no I/O.

records ─▶ credit.py ─▶ scoring.py ─▶ samples.py, aggregation.py ─▶ packing.py, batching.py ─▶ (a model) ─▶ logprobs.py
                            │                                                                                      │
         timeline.py, turn_returns.py, advantages.py                                                losses.py, values.py
                                                                                                           │
                                                              loss_tokens.py, loss_stats.py, divergence.py, proximal.py

config.py names what can be chosen and imports no torch; plugins.py finds a user's own. Docstrings state equation,
paper, shapes and normalisation.
"""
