"""The limits of a device: its memory and its matrix products, measured by a copy and by one large product.

floor = products of all prompts / rate of a product + (weights + keys and values, read once per step) / bandwidth
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from model import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Requests of one size that run at once."""

    requests: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """The rates of a device, measured on it."""

    bytes_per_s: float  # bytes read, when nothing is written
    flops: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "DeviceRates":
        is_gpu = device.type == "cuda"
        source = torch.ones(2**30 if is_gpu else 2**26, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = _median_s(lambda: target.copy_(source), device)
        size = 8192 if is_gpu else 512
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product_s = _median_s(lambda: left @ right, device)
        return cls(bytes_per_s=2 * len(source) / copy_s, flops=2 * size**3 / product_s)

    def floor_s(self, shape: Shape, batch: Batch, dtype: torch.dtype) -> float:
        """Return the seconds of all requests, from the first prompt token to the last sampled one."""
        prompts = batch.requests * batch.prompt_tokens
        num_steps = batch.new_tokens - 1  # the prompt gives the first token
        return 2 * prompts * _layer_weights(shape) / self.flops + num_steps * self.step_s(shape, batch, dtype)

    def step_s(self, shape: Shape, batch: Batch, dtype: torch.dtype) -> float:
        """Return the mean seconds of a step: weights, and the keys and values of all requests, are read once."""
        weights = _layer_weights(shape) + shape.vocabulary * shape.hidden
        mean_length = batch.prompt_tokens + batch.new_tokens / 2
        numbers = weights + batch.requests * mean_length * _kv_numbers(shape)
        return dtype.itemsize * numbers / self.bytes_per_s


def _layer_weights(shape: Shape) -> int:
    """Return the numbers in the matrices of all layers."""
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden
    return shape.layers * (attention + 3 * shape.intermediate * shape.hidden)


def _kv_numbers(shape: Shape) -> int:
    """Return the numbers in the keys and values of one token."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def _median_s(action: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(13):
        started_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[3:])  # the first ones warm up


def named(device: torch.device) -> str:
    """Return the device, its driver and torch, in words."""
    if device.type != "cuda":
        return f"CPU, torch {torch.__version__}"
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.split()
    except FileNotFoundError:
        told = []
    driver = told[0] if told else "of a version that nobody tells"
    return (
        f"{torch.cuda.get_device_name(device)}, driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
