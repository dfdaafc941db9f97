"""SGLang's own server on a torch without CUDA: `python launch.py ARGUMENTS of sglang.launch_server`.

The torchvision on PyPI is the CUDA build. Its compiled operators do not load beside a CPU torch, and its import stops
at two of them that it decorates. Declaring their names lets the Python part load; nothing here calls them. Child
processes run the top of this file again, so the names exist there too.
"""

import contextlib
import runpy

import torch

for operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # they exist where the real ones loaded
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
