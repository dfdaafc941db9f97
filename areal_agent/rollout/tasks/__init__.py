"""Where tasks come from, and which one is rolled out next.

    config.py       the section `tasks`
    imports.py      objects by their import path
    rows.py         the rows of a source: of a function, a file (files.py) or a data set (hugging_face.py)
    loading.py      rows ─▶ tasks: columns, filter, ids
    task_set.py     the tasks of all sources
    stream.py       the n-th task of a training run, a function of n
        mixture.py      which source, by weight      permutation.py   which task of it, shuffled
    draws.py        the next draw: over restarts, each position of the stream once
        curriculum.py   which tasks are passed over, by their success rate

Everything but draws.py and curriculum.py is settled before a run starts. Imports no torch.
"""
