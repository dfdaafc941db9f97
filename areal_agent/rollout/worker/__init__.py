"""A process that rolls out for a run: workflows, a gateway and a ledger shard of its own. A run starts any number.

    messages.py   what the two processes say to each other, and the frames that carry it
    client.py     the main process's end
    server.py     the worker's end
    __main__.py   `python -m areal_agent.rollout.worker --fd N`

The main process decides what is rolled out and when; trajectories reach it through the ledger.
"""
