"""Resources servers of NeMo Gym, over HTTP: none of its packages is needed here.

tasks.py     `load`: the rows of a data set, a JSONL file for each split
workflow.py  `solve`: the conversation of a row with the server's tools; the reward is what the server's /verify says
"""
