"""Starts SGLang's own server. The Python of SGLang's environment, which has no areal_agent, runs this file.

The server ends with the process that started it, all of its processes included. It demands the key of the variable
AREAL_AGENT_ENGINE_KEY, if there is one (foreign/key.py). On a machine without a GPU this adds
what SGLang needs to run on a CPU, which PyPI's wheels are not made for:

- two operators of torchvision are declared: PyPI only has its CUDA build, whose compiled half does not load there;
- the package `sgl_kernel` has no CPU build: a stand-in provides its names, and calling one raises. The operators that
  Qwen's vision models look up when they are imported are declared.

Images are processed by PIL, as the trainer does it; torchvision makes other pixels of them (image_files.py).

SGLang's schedulers are spawned and therefore run all of this file but its last lines; they also get the ability to
receive weights from the trainer (scheduler_extension.py).

SGLang checks only every five seconds whether it has been told to end (SIGTERM), and would be killed meanwhile while it
still frees GPU memory. Here it checks more often.
"""

import asyncio
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

FOREIGN = Path(__file__).parents[1] / "foreign"
WATCHDOG = "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog"
LOOK_S = 0.1
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--dtype", "float32"),
    "--sleep-on-idle",  # otherwise its idle scheduler keeps a core busy
)
OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
IMAGE_FLAGS = ("--image-processor-backend", "pil")


def needs_cpu(argv: list[str]) -> bool:
    """Return whether the server is to run on the CPU: `--device` says so, or it is not given and there is no GPU."""
    if "--device" in argv:
        return argv[argv.index("--device") + 1] == "cpu"
    return not torch.cuda.is_available()


def stand_in_for_what_cpus_lack() -> None:
    """Make `import sglang` possible on machines for which its compiled parts have no build."""
    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it exists already
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    if importlib.util.find_spec("sgl_kernel") is None:
        for operator in OPERATORS:
            torch.library.define(f"sgl_kernel::{operator}", "(Tensor x) -> Tensor")
        sys.modules["sgl_kernel"] = _AbsentKernels("sgl_kernel")


class _AbsentKernels(ModuleType):
    """A module that has every name, so that anything can be imported from it; calling what was imported raises."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: sgl_kernel has no build for CPUs")

        return absent


def look_often_for_the_end() -> None:
    """Make SGLang's server notice a SIGTERM at once. Optional: without it, the server ends later."""

    async def around(original: Callable[[Any], Awaitable[None]], manager: Any) -> None:
        while not manager.gracefully_exit:  # noqa: ASYNC110 (SGLang sets it, and tells nobody)
            await asyncio.sleep(LOOK_S)
        await original(manager)

    with contextlib.suppress(ImportError):
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        hooks.HookRegistry.register(WATCHDOG, around, hooks.HookType.AROUND)


def demand_key() -> None:
    """Demand a key of callers if the environment has one."""
    key = runpy.run_path(str(FOREIGN / "key.py"))
    if os.environ.get(key["KEY_VARIABLE"]):
        importlib.import_module("sglang.srt.entrypoints.http_server").app.add_middleware(key["KeyDemanded"])


if __name__ == "__main__" and needs_cpu(sys.argv):
    os.environ[CPU_VARIABLE] = "1"
    sys.argv[1:1] = CPU_FLAGS  # in front, so that arguments given take precedence
if CPU_VARIABLE in os.environ:
    stand_in_for_what_cpus_lack()
if __name__ == "__mp_main__":  # one of SGLang's own processes
    importlib.import_module("scheduler_extension").register()
if __name__ == "__main__":
    runpy.run_path(str(FOREIGN / "lifeline.py"))["end_with_parent"]()
    sys.argv[1:1] = IMAGE_FLAGS
    look_often_for_the_end()
    with contextlib.suppress(ImportError):  # of hooks, in a version without them, which then refuses our images
        importlib.import_module("image_files").register()
    demand_key()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
