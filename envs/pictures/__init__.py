"""A picture, and a question about it that only who sees it can answer.

tasks.py           the pictures, drawn from a seed
workflow.py        `solve`: one question, to its reward
demonstrations.py  chats with pictures, to begin a model that cannot speak yet
"""
