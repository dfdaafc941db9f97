"""The docker backend: every sandbox is a container, with an agent of ours beside its programs.

::

    provider.py      makes cells, and leaves none behind; keeper.py removes what a killed host leaves
    confinement.py   what a container may do: its configuration, the bounds its programs share, its owner
    engine.py        the engine's daemon, and its raw streams; way.py leads to a daemon on another machine
    images.py        images made of folders and Dockerfiles, and the default image
    cell.py          a container as a cell: programs and files, through its agent or, without python3, the engine's exec
    agent_link.py    the host's end of an agent, and how the agent gets into a container
    tunnel_host.py   a container's way to the network: the outer end of agent/tunnel.py
    agent/           the agent, which runs inside

The package is not called `docker` so that nobody takes it for the `docker` package, which only `engine.py` imports.
"""
