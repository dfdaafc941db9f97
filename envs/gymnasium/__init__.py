"""Environments of Gymnasium that can be told in text, by name (an extra).

tasks.py     `load`: seeds of an environment; those of the split `test` are not trained
workflow.py  `solve`: observations are messages, answers are actions, the sum of the rewards is the reward
"""
