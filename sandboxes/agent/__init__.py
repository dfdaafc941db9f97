"""The agent, which runs in a sandbox beside the programs. The host's end is `link.py`.

It is two processes, so that the one that forks programs never holds a byte of anybody's data::

    host ══ one stream ══ relay (relay.py)                          wire.py: the frames between these two
                            │ START, KILL + descriptors   ▲ STARTED, ENDED, FAILED
                            ▼                             │
                          forker (forker.py) ── fork, confine, run ──▶ program (program.py, interpreter.py)

In a container the forker is the first process, and the relay its child. In a jail the relay builds the jail around the
forker (walls.py) and stays outside. Without walls both stand beside the host. The stream is a container's standard
streams, or a socket. files.py handles files that are not trusted, and kernel.py makes system calls.

A sandbox with a network, or a way to a gateway, has a process for it, tunnel.py: a program with a user of its own.

The package uses only the standard library and nothing else of ours, since nothing of the host may be in these
processes. A container gets its source, so no image contains it.
"""
