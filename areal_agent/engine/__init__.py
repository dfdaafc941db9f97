"""Inference engines: token ids in, sampled token ids with log-probabilities and weight versions out.

    config.py     the config section `engine`, and how servers share GPUs and memory
    limits.py     the limits of a request, checked before it is sent and again before it is run
    wire/         our records as SGLang's JSON and back, the encoding that client and server share
    client.py     `HttpEngine`: the client of any server on that wire
    transport.py  HTTP to one server
    address.py    where an engine is and of which kind, for other processes
    pushes.py     the pushes of weights that one engine takes, and the verification of stored weights
    fake.py       `FakeEngine`: scripted and deterministic, in this process; for tests, including users' tests
    fleet/        several servers of any kind as one engine
    foreign/      the client of servers that are not ours: SGLang's (sglang/) and vLLM's (vllm/)
    embedded/     the engine that we bring: a server on that wire, on transformers' model code
    __main__.py   `python -m areal_agent.engine`: the embedded engine as a process

`HttpEngine`, `ForeignEngine`, `Fleet` and `FakeEngine` are `protocols.Engine`.
"""
