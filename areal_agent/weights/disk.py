"""Hands weights to engines through folders on a disk: for a host whose shared memory is too small, as in a container.

    directory/weights_000002/   model.safetensors, manifest.json     handed out last
    directory/weights_000001/   ...                                  the one before: an engine may still be reading it

A folder is written under a hidden name, brought to the disk, then renamed: under its own name it is whole, and is never
written to again. It knows nothing of engines and versions.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from areal_agent.engine.foreign.adapters import AdapterForm
from areal_agent.engine_types import DiskWeights
from areal_agent.manifest import MANIFEST, bring_to_disk, encode_manifest
from areal_agent.weights.adapter_folder import write_adapter

NUM_KEPT = 2


class DiskChannel:
    """The writing side. Its folders are removed by `close`."""

    def __init__(self, directory: Path, dtype: torch.dtype, adapter: AdapterForm | None = None) -> None:
        """Write into `directory`, which is this channel's own, in `dtype`; the matrices of adapters, if it says so."""
        self._directory = directory
        self._dtype = dtype
        self._adapter = adapter
        self._written: list[Path] = []
        self._number = 0

    def write(self, parameters: Mapping[str, Tensor]) -> DiskWeights:
        """Write the parameters into a folder of their own, and remove the one before the last."""
        self._number += 1
        folder = self._directory / f"weights_{self._number:06d}"
        hidden = folder.with_name(f".{folder.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            hidden.mkdir(parents=True, mode=0o700)
            self._fill(hidden, parameters)
            hidden.rename(folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        self._written.append(folder)
        while len(self._written) > NUM_KEPT:
            shutil.rmtree(self._written.pop(0))
        return DiskWeights(path=str(folder))

    def close(self) -> None:
        """Remove the folders."""
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)
        self._written.clear()

    def _fill(self, folder: Path, parameters: Mapping[str, Tensor]) -> None:
        tensors = {name: one.detach().to("cpu", self._dtype).contiguous() for name, one in parameters.items()}
        if self._adapter is None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            write_adapter(folder, tensors, self._adapter)
        (folder / MANIFEST).write_bytes(encode_manifest(folder, {}))
        bring_to_disk(folder)
