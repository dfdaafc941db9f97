"""The processes, servers and files that a run needs, on its machine or on those of a Ray cluster.

config.py       which machines those are
hosts.py        what a machine is to whoever starts processes, and this machine
ray_hosts.py    the machines of a Ray cluster
local.py        the workers' processes, ports, the model's folder and that for weights
gang.py         the trainer's processes, one for each rank
engines.py      the engine of a run, of whichever kind; servers that join and leave from outside
servers.py      how servers of each kind are started, and started again when they die
workers.py      the rollout workers: spreads rollouts, keeps workers alive
"""
