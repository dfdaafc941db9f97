"""A game of several turns: guess a number from 1 to 64 by "higher" and "lower".

tasks.py           the secret numbers
workflow.py        `solve`: one game, to its reward
demonstrations.py  how good and bad players play, on which the tiny model is warm-started
"""
