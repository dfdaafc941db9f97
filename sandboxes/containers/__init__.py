"""The docker backend: every sandbox is a container, with an agent of ours (`agent/`) beside its programs.

::

    provider.py      makes cells, and leaves none behind; keeper.py removes what a killed host leaves
    confinement.py   what a container may do: its configuration, its owner
    engine.py        the engine's daemon, and its raw streams; way.py leads to a daemon on another machine
    images.py        images made of folders and Dockerfiles, and the default image
    cell.py          a container as a cell
    own_python.py    a Python for the agent in images that have none

The package is not called `docker` so that nobody takes it for the `docker` package, which only `engine.py` imports.
"""
