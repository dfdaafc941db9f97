"""A GPU's memory in two processes of one host (CUDA IPC): handles as numbers and text, so that no pickle is needed.

Who shares memory keeps it. What he lets go of is freed once the other side has let go too: torch counts, in a file
of /dev/shm. Both processes number the GPUs as they like, so this one is named by its UUID. It knows no weights.
"""

from base64 import b64decode, b64encode
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from areal_agent.errors import WeightUpdateError
from areal_agent.types import CudaMemory


class DeviceSharing(Protocol):
    """The seam to the GPU: what is behind it cannot run without one."""

    def share(self, data: Tensor) -> CudaMemory:
        """Let others open these bytes, `[n]` uint8, once. What was written to them before is there for them."""
        ...

    def open(self, memory: CudaMemory, device: torch.device) -> Tensor:
        """The bytes that another process shares, not a copy. Raises WeightUpdateError where `device` is not theirs."""
        ...


class CudaSharing:
    """A `DeviceSharing` by torch's CUDA IPC."""

    def share(self, data: Tensor) -> CudaMemory:
        storage = cast(Any, data.untyped_storage())
        _, handle, num_bytes, offset, counter, counter_offset, event, waits = storage._share_cuda_()
        return CudaMemory(
            gpu=_uuid(data.device),
            handle=_as_text(handle),
            offset=offset,
            num_bytes=num_bytes,
            counter=_as_text(counter),
            counter_offset=counter_offset,
            event=_as_text(event),
            waits_for_event=waits,
        )

    def open(self, memory: CudaMemory, device: torch.device) -> Tensor:
        check_gpu(memory, _uuid(device) if device.type == "cuda" else str(device))
        target = torch.empty(0, dtype=torch.uint8, device=device)  # whose device has its number in any case
        try:
            storage = cast(Any, torch.UntypedStorage)._new_shared_cuda(
                target.device.index,
                b64decode(memory.handle, validate=True),
                memory.num_bytes,
                memory.offset,
                b64decode(memory.counter, validate=True),
                memory.counter_offset,
                b64decode(memory.event, validate=True),
                memory.waits_for_event,
            )
        except (RuntimeError, ValueError) as error:
            raise WeightUpdateError(
                f"cannot open the trainer's memory of GPU {memory.gpu}: {str(error)[:200]}; trainer and engine must be "
                "of one user on one host, and share its /dev/shm"
            ) from error
        return target.set_(storage)


def check_gpu(memory: CudaMemory, ours: str) -> None:
    """Raises WeightUpdateError unless it is the memory of this GPU."""
    if memory.gpu != ours:
        raise WeightUpdateError(
            f"the weights lie in the memory of GPU {memory.gpu}, and the engine runs on {ours}; put both on one GPU, "
            "or set trainer.transfer to 'shared_memory' or 'disk'"
        )


def _uuid(device: torch.device) -> str:
    return str(cast(Any, torch.cuda.get_device_properties(device)).uuid)


def _as_text(handle: bytes) -> str:
    return b64encode(handle).decode()
