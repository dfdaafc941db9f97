"""What runs in a process of its own, in a jail or beside the host: the launcher, and the walls of jails.

::

    wire.py       what host and launcher say to each other
    launcher.py   the launcher: forks, confines and reaps programs
      program.py    a forked child becomes a program
      bounds.py     the kernel's limits on each process
      landlock.py   what a program may change, where there are no walls
      processes.py  children, groups, the dead
      kernel.py     system calls that Python has no function for
    enter.py      the walls of a jail by system calls
    inside.py     the last steps inside a jail; then the launcher serves

It stands alone: standard library only, nothing of the rest of the package, since nothing of the host may be in these
processes. A jail is shown this folder.
"""
