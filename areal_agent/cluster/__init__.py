"""What a run needs of its machine.

local.py    starts processes
workers.py  the rollout workers: spreads rollouts, keeps workers alive
seat.py     the place of one worker, whichever process has it
models.py   obtains the model folder
"""
