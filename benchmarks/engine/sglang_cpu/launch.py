"""SGLang's own server on a torch without CUDA: `python launch.py ARGUMENTS of sglang.launch_server`.

The torchvision that PyPI has for it is the CUDA build, whose compiled operators do not load beside a CPU torch, and
its import stops at two that it decorates. Declaring their names lets the Python part load; nothing here calls them.
Child processes run the top of this file again, so it holds in them as well.
"""

import contextlib
import runpy

import torch

for operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # the real ones are there
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
