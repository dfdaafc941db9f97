"""A GPU that is not there: its tensors say `cuda:0` and lie in the host's memory, with real values.

Within `FakeGpu`, code of the project takes the branches that it takes on a GPU, and an operation whose tensors do not
all lie there fails, as CUDA's would. Every copy between host and GPU is noted with the line of the project that made
it, and so is every other wait for a value (`item`, a mask as an index). Kernels, memory and speed are not seen.

    tensor.to(GPU), torch.zeros(2, device=GPU) ─▶ FakeGpu: on the CPU instead, its storage is marked
    tensor.device, .is_cuda, .is_cpu           ─▶ FakeGpu: by the mark
    every operation, also of backward passes   ─▶ _Operations: checks the marks, and marks what comes out
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from areal_agent.engine.embedded.packed import Spans
from areal_agent.trainer.compiled import Compiled

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PACKAGE = str(Path(__file__).parent.parent / "areal_agent")
TO_HOST, TO_GPU, WAITS = "to host", "to GPU", "waits"

aten, functorch = torch.ops.aten, torch._C._functorch
COPIES = (aten.copy_, aten._foreach_copy_)
WAITING = (aten._local_scalar_dense, aten.equal, aten.allclose, aten.is_nonzero, aten.nonzero, aten.masked_select)
WAITING += (aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive, aten.bincount)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)
READING = (Tensor.tolist, Tensor.__repr__, Tensor.__format__)
REFUSED = (Tensor.numpy, Tensor.__array__)


class WrongDevice(RuntimeError):
    """An operation got tensors of the host and of the GPU."""


def on_gpu(tensor: Tensor) -> bool:
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    while functorch.is_functorch_wrapped_tensor(held):  # within a vmap
        held = functorch.get_unwrapped(held)
    return getattr(held.untyped_storage(), "is_on_fake_gpu", False)


def put(tensor: Tensor) -> Tensor:
    """Mark a tensor, and all others over its storage, as on the GPU."""
    tensor.untyped_storage().is_on_fake_gpu = True  # the storage keeps its Python object
    return tensor


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and not one.is_meta]


def _any_on_gpu(tree: Any) -> bool:
    return any(map(on_gpu, _tensors(tree)))


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class FakeGpu(TorchFunctionMode):
    """Within this context `cuda` is the fake GPU. `copies` counts what crossed, by (kind, line of the project)."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.is_moving = False  # marks are set by who moves
        self.makes_on_gpu = False  # what torch's own functions make for tensors on the GPU
        self._operations = _Operations(self)

    def __enter__(self) -> Any:
        own = {
            "areal_agent.trainer.tree_attention.create_block_mask": self._mask,
            "torch.autograd._engine_run_backward": self._backward,
            "torch.save": self._save,
        }
        self._replaced = [patch(name, one) for name, one in (_REPLACED | own).items()]
        for one in self._replaced:
            one.start()
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)
        for one in self._replaced:
            one.stop()

    def note(self, kind: str) -> None:
        self.copies[kind, _line()] += 1

    def _mask(self, *args: Any, _compile: bool, **more: Any) -> Any:
        """Make FlexAttention's mask, not compiled and not checked; what it calls inside is not ours."""
        with self.setting("is_moving", True):
            return create_block_mask(*args, **more)

    def _backward(self, *args: Any, **more: Any) -> Any:
        """Run autograd's engine within this mode, which torch left: it calls functions and hooks of the project."""
        super().__enter__()
        try:
            return _ENGINE(*args, **more)
        finally:
            super().__exit__(None, None, None)

    def _save(self, tree: Any, *args: Any, **more: Any) -> None:
        self._read(tree)
        _SAVE(tree, *args, **more)

    def _read(self, tree: Any) -> None:
        for _ in filter(on_gpu, _tensors(tree)):
            self.note(TO_HOST)

    @contextmanager
    def setting(self, name: str, value: bool) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAID and on_gpu(args[0]) and not _in_distributed():
            return _SAID[func]
        if func in REFUSED and on_gpu(args[0]):
            raise WrongDevice(f"{func.__name__} of a tensor on the GPU, at {_line()}")
        if kwargs.get("generator") is not None and (_is_cuda(kwargs.get("device")) or _any_on_gpu((args, kwargs))):
            raise WrongDevice(f"{func.__name__} on the GPU, with a generator of the host, at {_line()}")
        if func in READING or (func in FROM_HOST and not isinstance(args[0], Tensor)):
            self._read(args[0])
        if func is Tensor.cpu:
            return self._moved(args[0], CPU)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "meta":
            return self._made(func, args, kwargs)
        with self.setting("makes_on_gpu", _any_on_gpu((args, kwargs))):
            return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_gpu = _is_cuda(kwargs["device"])
        if func in FROM_HOST:
            if isinstance(args[0], Tensor):
                args = (self._moved(args[0], torch.device(kwargs["device"])), *args[1:])
            elif is_gpu:
                self.note(TO_GPU)
        with self.setting("is_moving", True):
            made = func(*args, **{**kwargs, "device": CPU})
        return put(made) if is_gpu else made

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        like = [one for one in given if isinstance(one, Tensor)]
        devices = [torch.device(one) for one in given if isinstance(one, (str, torch.device))]
        devices += [GPU if on_gpu(one) else CPU for one in like]
        if devices and devices[0].type == "meta":
            return tensor.to(*args, **kwargs)
        moved = self._moved(tensor, devices[0]) if devices else tensor
        dtype = next((one for one in (*given, *(one.dtype for one in like)) if isinstance(one, torch.dtype)), None)
        return moved.to(dtype or tensor.dtype, copy=bool(kwargs.get("copy")) and moved is tensor)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if on_gpu(tensor) is (device.type == "cuda") or tensor.is_meta or _in_distributed():
            return tensor
        self.note(TO_GPU if device.type == "cuda" else TO_HOST)
        with self.setting("is_moving", True):
            moved = tensor.clone()
        return put(moved) if device.type == "cuda" else moved


def kernel(q: Tensor, k: Tensor, v: Tensor, of_queries: Spans, of_keys: Spans, scaling: float) -> Tensor:
    """What kernels for packed rows compute; shapes are those of `packed.Kernel`."""
    (query, before_end), (key, beyond) = _places(of_queries, len(q)), _places(of_keys, len(k))
    sees = (query[:, None] == key) & (before_end[:, None] <= beyond)
    rows = (one.transpose(0, 1)[None] for one in (q, k, v))
    attended = scaled_dot_product_attention(*rows, attn_mask=sees, scale=scaling, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _refuse_graphs(*_: Any, **__: Any) -> Any:
    raise RuntimeError("nothing is launched here")


def _places(spans: Spans, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and how many of its tokens follow it, [T] each."""
    place = torch.arange(num_tokens, device=spans.offsets.device)
    sequence = torch.searchsorted(spans.offsets, place, right=True)
    return sequence, spans.offsets[sequence] - place


_REPLACED = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.get_device_name": lambda *_: "a fake H100",
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.empty_cache": lambda: None,
    "torch.cuda.is_current_stream_capturing": lambda: False,  # asks for a driver, where torch is built for CUDA
    "torch.cuda.graph_pool_handle": lambda: _refuse_graphs(),
    "torch.cuda.mem_get_info": lambda *_: (2**30, 2**30),
    "torch.cuda.max_memory_allocated": lambda *_: 0,
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": lambda tensors: {
        (GPU if on_gpu(group[0][0][0]) else CPU, dtype): group for (_, dtype), group in _GROUPED(tensors).items()
    },
    "torch.utils.checkpoint._allowed_determinism_checks_to_fns": {  # asked within and without the mode
        "default": lambda one: (one.shape, one.dtype, on_gpu(one))
    },
    "torch.histc": lambda ids, *args, **more: _HISTC(ids.float(), *args, **more).to(ids.dtype),  # CUDA's takes ids
    "torch.autocast": lambda _, **more: _AUTOCAST("cpu", **more),
    "areal_agent.trainer.model.packed_kernel": lambda: kernel,
    "areal_agent.trainer.trainer.Compiled": lambda: Compiled(lambda _: _refuse_graphs),
    "areal_agent.engine.embedded.model.packed_kernel": lambda: kernel,
}
_AUTOCAST, _GROUPED = torch.autocast, clip_grad._group_tensors_by_device_and_dtype
_ENGINE, _HISTC, _SAVE = torch.autograd._engine_run_backward, torch.histc, torch.save
_SAID = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}


class _Operations(TorchDispatchMode):
    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:  # of which this gets the local tensors
            return NotImplemented
        given = _tensors((args, kwargs))
        on = [on_gpu(one) for one in given]
        is_theirs = not any(on) and ((self._gpu.makes_on_gpu and not given) or _in_distributed("fsdp/"))
        if self._gpu.is_moving or not (any(on) or is_theirs):
            return func(*args, **kwargs)
        name = func.overloadpacket
        if any(on) and not all(on):
            self._check(name, given, on)
        if name in WAITING or _asks_for_size(name, args, kwargs):
            self._gpu.note(WAITS)
        found = func(*args, **kwargs)
        if name not in COPIES:
            tree_map(lambda one: put(one) if isinstance(one, Tensor) and not one.is_meta else one, found)
        return found

    def _check(self, name: Any, given: list[Tensor], on: list[bool]) -> None:
        if name in COPIES:
            self._gpu.note(TO_GPU if on[0] else TO_HOST)
            return
        if any(one.ndim and not is_on for one, is_on in zip(given, on, strict=True)):  # numbers may be the host's
            if _in_distributed():
                for one in given:
                    put(one)
                return
            places = ", ".join(
                f"{tuple(one.shape)} on {GPU if is_on else CPU}" for one, is_on in zip(given, on, strict=True)
            )
            raise WrongDevice(f"{name} got tensors of two devices: {places}, at {_line()}")


def _asks_for_size(name: Any, args: Any, kwargs: Any) -> bool:
    """Whether what comes out is as long as values say: of a mask as an index, and of counts without their sum."""
    if name in INDEXING:
        return any(one.dtype == torch.bool for one in _tensors(args[1]))
    return name is aten.repeat_interleave and kwargs.get("output_size") is None


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line() -> str:
    """The function of the project that is running: that of a test, where none is."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name.removeprefix(PACKAGE + '/')} {frame.f_code.co_name}"
    return "a test"


def _in_distributed(part: str = "") -> bool:
    """FSDP2 makes its buffers on the CPU that its mesh is of."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return False
        if f"torch/distributed/{part}" in name:
            return True
    return False
