"""Starts vLLM's own server as `VllmServer` needs it. Run by the Python of vLLM's environment, without areal_agent.

The server ends with the process that started it, if that gave it a lifeline. It demands the key of the variable
AREAL_AGENT_ENGINE_KEY, if there is one (foreign/key.py). Arguments are those of `vllm serve`, a
command that itself fails in the package for CPUs. On a CPU, vLLM gets the settings that it needs there: float32, no
compilation, and a bound on its memory, of which it would otherwise take nearly all.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

SERVER = "vllm.entrypoints.openai.api_server"
FOREIGN = Path(__file__).parents[1] / "foreign"
key = SimpleNamespace(**runpy.run_path(str(FOREIGN / "key.py")))
KeyDemanded = key.KeyDemanded  # which vLLM imports from here
FLAGS = (
    "--enable-scale-out",  # token ids in and out
    *("--logprobs-mode", "processed_logprobs"),  # after temperature
    *("--worker-extension-cls", "worker_extension.WeightLoading"),
    *("--middleware", "image_files.ImageFilesTaken"),
)
ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""If this variable is 0, a model on one CPU runs in the process that schedules it: one process fewer to start.

vLLM uses a separate process so as to bind its threads to cores; here they are not bound (VARIABLES).
"""
CPU_FLAGS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "1G")
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables pauses, aborts and weight updates
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share a machine
}


if __name__ == "__main__":  # vLLM's own processes import this file, too
    runpy.run_path(str(FOREIGN / "lifeline.py"))["end_with_parent"]()
    os.environ.update(VARIABLES)
    is_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    if is_cpu:
        os.environ.setdefault(ONE_PROCESS, "0")
    protected = ("--middleware", "launcher.KeyDemanded") if os.environ.get(key.KEY_VARIABLE) else ()
    # in front, so that arguments given take precedence
    sys.argv[1:1] = (*FLAGS, *protected, *(CPU_FLAGS if is_cpu else ()))
    runpy.run_module(SERVER, run_name="__main__", alter_sys=False)
