"""Memory of one process that another one on the same device opens: CUDA's own sharing, and a file's on a CPU.

    the trainer    SharedBuffer(num_bytes, device)   data ─ handle ─▶ JSON, base64
    the engine     with opened(handle, device) as data: ...           reads the same bytes, which nobody copied

The device of the buffer says which form it has. On a GPU the handle is what CUDA makes of memory for other processes
(`cudaIpcGetMemHandle`), and it opens on that GPU alone. On a CPU it is the path of a file in memory, which proves the
same code where there is no GPU. Either fails with what torch raises: containers, MIG and some allocators permit none.
"""

import base64
import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from areal_agent.engine.embedded.transfer import gpu_uuid, whole_blocks


class SharedBuffer:
    """Bytes in memory of `device`, zeros at first, a whole number of blocks. `close` takes them back."""

    def __init__(self, num_bytes: int, device: torch.device, folder: Path) -> None:
        """Without a GPU the bytes lie in a file in `folder` with mode 0600."""
        size = whole_blocks(num_bytes)
        self.device = gpu_uuid(device)
        self._file: Path | None = None
        if device.type == "cuda":
            self.data = torch.zeros(size, dtype=torch.uint8, device=device)
            storage = cast(Any, self.data.untyped_storage())
            told = storage._share_cuda_()
            told = (*told[:7], False)  # no event to wait for: what is written is there before anybody is told
            storage._release_ipc_counter_cuda(*told[4:6])  # torch would wait at `close` for somebody to have opened it
        else:
            with tempfile.NamedTemporaryFile(prefix="weights-", dir=folder, delete=False) as file:
                self._file = Path(file.name)
                file.truncate(size)
            self.data = _mapped(file.name, size)
            told = (file.name, size)
        words = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in told]
        self.handle = json.dumps(words)

    def close(self) -> None:
        """Remove the file, or give the memory back. Nobody may be reading it."""
        self.data = self.data.new_empty(0)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


@contextmanager
def opened(handle: str, uuid: str, device: torch.device) -> Generator[Tensor]:
    """Give the bytes behind a handle, uint8 [n], until the end of the block.

    Raises ValueError for a handle that is none or of another GPU, and RuntimeError when it cannot be opened.
    """
    if uuid != (own := gpu_uuid(device)):
        raise ValueError(f"they lie on {_named(uuid)}, and the engine computes on {_named(own)}")
    words = json.loads(handle)
    if device.type == "cuda":
        _, *told = [base64.b64decode(one, validate=True) if isinstance(one, str) else one for one in words]
        storage = cast(Any, torch.UntypedStorage)._new_shared_cuda(device.index or 0, *told)
        yield torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        torch.cuda.current_stream(device).synchronize()  # before the memory is closed
    else:
        path, size = words
        if not Path(path).is_file() or Path(path).stat().st_size != size:  # torch would make or enlarge it
            raise ValueError(f"there is no {path!r} of {size} bytes")
        yield _mapped(path, size)


def _mapped(path: str, num_bytes: int) -> Tensor:
    storage = cast(Any, torch.UntypedStorage).from_file(path, True, num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _named(uuid: str) -> str:
    return f"the GPU {uuid}" if uuid else "a CPU"
