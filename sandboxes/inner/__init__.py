"""The launcher and the walls of jails, which run in processes of their own, in a jail or beside the host.

::

    wire.py       the frames between host and launcher
    launcher.py   the launcher: forks, confines and reaps programs
      program.py    turns a forked child into a program
      processes.py  children: their ends, killing them, executables (the agent of containers has it too)
      files.py      files beneath a folder that is not trusted (for the host and for the agent of containers)
    kernel.py     system calls that Python has no function for
    walls.py      the walls of jails, and the zygote that forks their first processes

The package uses only the standard library and nothing else of ours, since nothing of the host may be in these
processes.
"""
