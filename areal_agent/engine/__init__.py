"""Inference engines: token ids in; sampled token ids with log-probabilities and weight versions out.

::

    config.py     the config section `engine`, and how servers share GPUs and memory
    wire/         our records as SGLang's JSON and back; client and servers share it
    client.py     `HttpEngine`, the client of a server that speaks this wire
    transport.py  HTTP to one server
    address.py    the address and kind of an engine, for other processes
    pushes.py     the weight pushes that one engine takes, and the verification of stored weights
    fake.py       `FakeEngine`: scripted and deterministic, in this process; for tests, including users' tests
    fleet/        several servers of any kind as one engine
    foreign/      `ForeignEngine`, the client of SGLang's and vLLM's own servers
    sglang/       SGLang's server: its environment, its launcher, and our extension inside it
    vllm/         vLLM's server: the same
    embedded/     our own server on that wire, running transformers' model code
    __main__.py   `python -m areal_agent.engine`, the embedded engine as a process

`HttpEngine`, `ForeignEngine`, `Fleet` and `FakeEngine` implement `protocols.Engine`.
"""
