"""The games of the package textarena by name, with its own rules and scores (an extra).

tasks.py     `load`: starts of a game; those of the split `test` are not trained
workflow.py  `solve`: the policy is one player, or all of them, each with a conversation and a reward of its own
"""
