"""The launcher and the walls of jails, which run in processes of their own, in a jail or beside the host.

::

    wire.py       the frames between host and launcher
    launcher.py   the launcher: forks, confines and reaps programs
      program.py    turns a forked child into a program
      landlock.py   confines what a program may change where there are no walls
      processes.py  children: their ends, killing them, executables (the agent of containers has it too)
      files.py      files beneath a folder that is not trusted (for the host and for the agent of containers)
    kernel.py     system calls that Python has no function for
    enter.py      the walls around all jails, by system calls
      namespaces.py  namespaces and mounts
    zygote.py     behind those walls, forks the first process of each jail
    inside.py     the walls between jails; then the launcher serves

The package uses only the standard library and nothing else of ours, since nothing of the host may be in these
processes. A jail shows this folder to its programs.
"""
