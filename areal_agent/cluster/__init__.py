"""What a run needs of its machine.

local.py           starts the trainer and the workers
engines.py         the engine of a run, of whichever kind: embedded.py, sglang.py, vllm.py say how its servers start
servers.py         servers of other environments        kept_server.py  servers that are started again
engine_control.py  servers that join and leave from outside
workers.py         the rollout workers: spreads rollouts, keeps workers alive
seat.py            the place of one worker, whichever process has it
weights_folder.py  where weights are handed over
models.py          obtains the model folder
"""
