"""The sources of tasks, and the choice of the next one.

    config.py        the section `tasks`, and objects by their import path
    loading.py       sources ─▶ rows ─▶ tasks: columns, filter, ids
    hugging_face.py  the rows of a Hugging Face data set
    stream.py        the n-th task of a training run, as a function of n: sources by weight, shuffled
    draws.py         the next draw: each position of the stream once, over restarts; the curriculum

Everything but draws.py is settled before a run starts. Imports no torch.
"""
