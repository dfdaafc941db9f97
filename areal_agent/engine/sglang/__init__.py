"""A real SGLang server as an engine. Written for 0.5.23, and tested against it.

    engine.py         `SglangEngine`: one server as `protocols.Engine`
    dialect.py        how it is asked for a completion      answer.py  reads the events of an answer
    loader.py         lets it load weights      info.py  what it says of itself
    launcher.py       runs in SGLang's own environment: starts its server

Requests, weights and the model behind it: `foreign/`, which vLLM's client shares. The wire is that of `wire/`; SGLang's
own ways are known here alone. No torch, but in the launcher.
"""

from pathlib import Path

LAUNCHER = Path(__file__).with_name("launcher.py")
"""Run it with the Python of SGLang's environment; arguments are those of `sglang.launch_server`."""
