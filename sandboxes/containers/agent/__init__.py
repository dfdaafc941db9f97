"""The agent: what runs inside a container beside the programs. Its source is sent there; nothing of it is in an image.

Two processes, so that the one from which programs are forked never holds a byte of anybody's data::

    host ══ one stream ══ relay (relay.py)                          wire.py: the frames between these two
                            │ START, KILL + descriptors   ▲ ENDED, FAILED
                            ▼                             │
                          forker, the first process (forker.py) ── fork, confine, run ──▶ program (program.py)

A container with a network has a third: tunnel.py, a program among programs but for its user.

It uses such modules of the standard library as Debian's `python3-minimal` has. Where an image has more (`ctypes`,
`json`, `resource`), programs get more: a warm interpreter for Python, a second filter of system calls.
"""
