"""A real SGLang server as an engine. Written for 0.5.23, and tested against it.

    engine.py         `SglangEngine`: one server as `protocols.Engine`
    request.py        one request at it, from the first byte to the last      answer.py  reads its events
    info.py           what a server says of itself      served_model.py  what it does not say, from the model's folder
    weight_folders.py weights in shared memory as folders that SGLang loads   tensors.py what such a folder holds
    fleet.py          several servers as one engine           routing.py  which of them a request goes to
    launcher.py       runs in SGLang's own environment: starts its server

The wire is that of `wire/`; SGLang's own ways are known here alone. No torch, but in the launcher.
"""

from pathlib import Path

LAUNCHER = Path(__file__).with_name("launcher.py")
"""Run it with the Python of SGLang's environment; arguments are those of `sglang.launch_server`."""
