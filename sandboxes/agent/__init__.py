"""The agent, which runs inside a container beside the programs. Its source is sent there, so no image contains it.

It is two processes, so that the one that forks programs never holds a byte of anybody's data::

    host ══ one stream ══ relay (relay.py)                          wire.py: the frames between these two
                            │ START, KILL + descriptors   ▲ ENDED, FAILED
                            ▼                             │
                          forker, the first process (forker.py) ── fork, confine, run ──▶ program (program.py)

A container with a network has a third process, tunnel.py: a program like the others, but with its own user.

The agent uses only modules of the standard library that Debian's `python3-minimal` has. Where an image has more
(`ctypes`, `json`, `resource`), programs get more: a warm interpreter for Python, a second filter of system calls.
"""
