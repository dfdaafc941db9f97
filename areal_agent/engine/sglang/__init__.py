"""A real SGLang server as an engine. Written for 0.5.23, and tested against it.

    server.py         `SglangServer`: one server, as `foreign/` wants it
    dialect.py        how it is asked for a completion      answer.py  reads the events of an answer
    loader.py         lets it load weights      receiver.py  lets it take them from the trainer
    info.py           what it says of itself
    launcher.py, scheduler_extension.py         run in SGLang's own environment: start its server; are in its schedulers

The client, its requests, its weights and the model behind it: `foreign/`. The wire is that of `wire/`; SGLang's
own ways are known here alone. No torch, but in those two.
"""

from pathlib import Path

SGLANG_LAUNCHER = Path(__file__).with_name("launcher.py")
"""Run it with the Python of SGLang's environment; arguments are those of `sglang.launch_server`."""
