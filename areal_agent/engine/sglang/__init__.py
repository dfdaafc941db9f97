"""A real SGLang server as an engine. Written for 0.5.23, and tested against it.

    server.py               `SglangServer`, the `foreign.server.ForeignServer` of one server
    launcher.py             starts SGLang's server, in SGLang's own environment
    scheduler_extension.py  runs in SGLang's schedulers, in the same environment
    image_files.py          runs in SGLang's front end, in the same environment

Everything that vLLM shares is in `foreign/`; the JSON is that of `wire/`. Only launcher.py and scheduler_extension.py
import torch.
"""

from pathlib import Path

SGLANG_LAUNCHER = Path(__file__).with_name("launcher.py")
"""Run it with the Python of SGLang's environment; it takes the arguments of `sglang.launch_server`."""
