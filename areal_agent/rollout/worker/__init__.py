"""A process that rolls out for a run: workflows, a gateway and a ledger shard of its own. The run starts any number.

    messages.py   what the two processes say to each other
    channel.py    how: frames over a socket pair
    client.py     the main process's end            server.py   the worker's end
    metered.py    the engine as the worker sees it, with its busy time kept
    __main__.py   `python -m areal_agent.rollout.worker --fd N`

What is rolled out, and when, is decided in the main process; trajectories reach it through the ledger.
"""
