"""Pushed weights as folders that a server loads, each published whole or not at all.

    shared memory ─── copied, its checksum verified ──▶ hidden folder, manifest.json last ── rename ──▶ folders/PUSH_ID/
    a folder on disk ── hard links to its files ──────▶ hidden folder ───────────────────── rename ──▶ folders/PUSH_ID/

A server loads whatever a folder contains: tensors that are missing keep their old values, and ones that do not fit may
crash it. So a folder is checked against its manifest and the model before a server hears of it. It is kept as long as a
server serves it, since a server that fails at later weights is given these again.
Adapters are folders in PEFT's format: adapter_config.json and adapter_model.safetensors. A server that applies adapters
starts with those of a checkpoint or with ones that change nothing, because the first request already names them.
"""

import asyncio
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from safetensors import SafetensorError, safe_open

from areal_agent.engine.pushes import WEIGHTS, weight_files
from areal_agent.engine.wire.fields import WireError, as_integer, as_object, decode_json, get
from areal_agent.errors import WeightUpdateError
from areal_agent.files import MANIFEST, encode_manifest, no_device, read_manifest
from areal_agent.process import uninterrupted
from areal_agent.types import DiskWeights, JsonObject, SharedMemoryWeights, TensorEntry

TIED_HEAD = "lm_head.weight"

ITEM_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}

_LENGTH_BYTES = 8


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors in a Hugging Face folder. Raises WeightUpdateError if a file is not whole."""
    return {name: shape for file in _files(folder) for name, shape in read_file_shapes(file).items()}


def read_file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors in a file. Raises WeightUpdateError if it is not whole."""
    try:
        with safe_open(no_device(file), "np") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            for name, tensor in tensors.items():
                if (dtype := tensor.get_dtype()) not in ITEM_BYTES:
                    raise ValueError(f"{name!r} is of type {dtype!r}; it must be one of {', '.join(ITEM_BYTES)}")
            return {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightUpdateError(
            f"cannot read weights from {str(file)!r}: {error}; it must be a whole safetensors file"
        ) from error


def _files(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in weight_files(folder)]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"cannot read the index of the weights in {str(folder)!r}: {error!r}") from error


def prove_fits(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, is_tied: bool, where: str
) -> None:
    """Raise WeightUpdateError unless these are exactly the expected tensors.

    A tied model's head is its embedding, so it does not matter whether the head is saved again.
    """
    ignored = {TIED_HEAD} if is_tied else set[str]()
    missing = sorted(set(expected) - set(found) - ignored)
    unknown = sorted(set(found) - set(expected) - ignored)
    if missing or unknown:
        raise WeightUpdateError(
            f"the weights {where} lack {len(missing)} tensors {missing[:3]} and have {len(unknown)} extra ones that "
            f"the engine's model lacks {unknown[:3]}; publish the model that the engine loaded"
        )
    for name in set(found) & set(expected):
        if found[name] != expected[name]:
            raise WeightUpdateError(
                f"{name!r} has shape {found[name]} {where} and the engine's model has {expected[name]}; "
                "publish the model that the engine loaded"
            )


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Encode the header of a safetensors file from names, dtypes (`F32`) and shapes.

    The tensors' bytes follow it without gaps, in this order.
    """
    header: dict[str, JsonObject] = {"__metadata__": {"format": "pt"}}  # which transformers demands
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        start = end
    encoded = orjson.dumps(header)
    padded = encoded.ljust(-(-len(encoded) // _LENGTH_BYTES) * _LENGTH_BYTES)
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded


_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PIECE_BYTES = 2**24


class WeightFolders:
    """Makes the folder of a push once, however many servers use it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_users: dict[Path, int] = {}  # of the folders made here

    async def take(self, push_id: str, weights: SharedMemoryWeights | DiskWeights) -> Path:
        """Return a verified folder with these weights, which lasts until `release`. Raises WeightUpdateError."""
        folder = Path(weights.path).parent / "folders" / push_id
        async with self._lock:
            if folder not in self._num_users:
                await self._make(weights, folder)
            self._num_users[folder] = self._num_users.get(folder, 0) + 1
        try:
            await asyncio.to_thread(prove_manifest, folder)
        except BaseException:
            await self.release(folder)
            raise
        return folder

    async def _make(self, weights: SharedMemoryWeights | DiskWeights, folder: Path) -> None:
        """Make the folder. A cancelled call leaves nothing behind, even later, because the same push may come again."""
        try:
            await uninterrupted(asyncio.to_thread(publish, weights, folder))
        except asyncio.CancelledError:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def release(self, folder: Path) -> None:
        """Note that a server no longer needs this folder. Folders that were not made here stay."""
        async with self._lock:
            if folder not in self._num_users:
                return
            self._num_users[folder] -= 1
            if not self._num_users[folder]:
                del self._num_users[folder]
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def publish(weights: SharedMemoryWeights | DiskWeights, folder: Path) -> None:
    """Make `folder`. Raises WeightUpdateError, and then there is no such folder."""
    hidden = folder.with_name(f".{folder.name}")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True, mode=0o700)
        if isinstance(weights, DiskWeights):
            shutil.copytree(weights.path, hidden, copy_function=_name_again, dirs_exist_ok=True)
        else:
            _copy(weights, hidden / WEIGHTS)
            (hidden / MANIFEST).write_bytes(encode_manifest(hidden, {}))
        os.replace(hidden, folder)
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot turn the weights in {weights.path!r} into the folder {str(folder)!r}: {error}"
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def prove_manifest(folder: Path) -> None:
    """Raise WeightUpdateError unless every file is as the folder's manifest says, which names all weights."""
    try:
        digests, _ = read_manifest(folder)
        if unnamed := {one.name for one in folder.glob("*.safetensors")} - digests.keys():
            raise ValueError(f"the manifest does not name {min(unnamed)}")
        for name, digest in digests.items():
            if not digest.is_of_file(folder / name):
                raise ValueError(f"{name} is not what was written: it differs from the manifest")
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot take weights from {str(folder)!r}: {error}; a folder is pushed whole, with its manifest"
        ) from error


def _name_again(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the disk cannot. A pushed file is never written again, so a link is enough."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def _copy(weights: SharedMemoryWeights, target: Path) -> None:
    """Write the tensors as one safetensors file. Raises WeightUpdateError if they do not match their record."""
    with Path(weights.path).open("rb") as source:
        mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    crc32 = 0
    with mapped, memoryview(mapped) as memory, target.open("wb") as file:
        file.write(encode_header((entry.name, dtype_of(entry), entry.shape) for entry in weights.entries))
        for entry in weights.entries:
            if not 0 <= entry.offset <= len(memory) - entry.num_bytes:
                raise WeightUpdateError(
                    f"{entry.name!r} lies outside of {weights.path!r}: its record is damaged; publish the weights again"
                )
            for piece in _pieces(entry):
                with memory[piece] as data:
                    crc32 = zlib.crc32(data, crc32)
                    file.write(data)
    if crc32 != weights.crc32:
        raise WeightUpdateError(
            f"the weights in {weights.path!r} have checksum {crc32:#010x} and their record says {weights.crc32:#010x}; "
            "they were damaged or overwritten while being read: publish them again"
        )


def dtype_of(entry: TensorEntry) -> str:
    """Return safetensors' name of a dtype. Raises WeightUpdateError for one that engines do not load."""
    if entry.dtype not in _DTYPES:
        raise WeightUpdateError(f"{entry.name!r} has dtype {entry.dtype!r}; it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[entry.dtype]


def _pieces(entry: TensorEntry) -> Iterator[slice]:
    end = entry.offset + entry.num_bytes
    for start in range(entry.offset, end, _PIECE_BYTES):
        yield slice(start, min(start + _PIECE_BYTES, end))


CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix that PEFT adds to the names of a model's matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterForm:
    """The description of adapters, all but their numbers."""

    base: Path  # the model that they belong to
    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def encode(self) -> bytes:
        """Encode PEFT's config file."""
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.base),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": self.target_modules,
            "bias": "none",
            "inference_mode": True,
        }
        return orjson.dumps(fields, option=orjson.OPT_INDENT_2)

    def shapes(self, model: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the matrices for a model: A [R, I] and B [O, R] for each adapted weight [O, I]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in model.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in self.target_modules and name != module and len(shape) == 2:
                shapes[f"{PREFIX}{module}.lora_A.weight"] = (self.rank, shape[1])
                shapes[f"{PREFIX}{module}.lora_B.weight"] = (shape[0], self.rank)
        return shapes


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds adapters and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_form(folder: Path) -> AdapterForm:
    """Read the description of a folder's adapters. Raises WeightUpdateError if its config is incomplete."""
    try:
        fields = as_object(decode_json(no_device(folder / CONFIG).read_bytes()), CONFIG)
        names: list[object] = get(fields, "target_modules", list)
        return AdapterForm(
            base=Path(get(fields, "base_model_name_or_path", str)),
            rank=as_integer(fields.get("r"), "r"),
            alpha=float(fields["lora_alpha"]),
            target_modules=tuple(map(str, names)),
        )
    except (OSError, KeyError, TypeError, ValueError, WireError) as error:
        raise WeightUpdateError(f"cannot read the config of the adapters in {str(folder)!r}: {error}") from error


def prove_adapter(folder: Path, model: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightUpdateError unless the folder holds all adapters for a model with these tensors, and no others."""
    form = read_form(folder)
    expected, found = form.shapes(model), read_file_shapes(folder / ADAPTER_WEIGHTS)
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise WeightUpdateError(
            f"the adapters in {str(folder)!r} are not those of rank {form.rank} for the engine's model: "
            f"{', '.join(wrong[:3])}; publish those of the model that the engine loaded"
        )


def begin_adapter(folder: Path, form: AdapterForm, saved: Path | None) -> Path:
    """Make `folder` with the adapters of the folder `saved`, or with adapters that change nothing.

    Raises WeightUpdateError if the model cannot be read.
    """
    folder.mkdir()
    (folder / CONFIG).write_bytes(form.encode())
    if saved is not None:
        shutil.copyfile(saved / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
        return folder
    shapes = form.shapes(read_shapes(form.base))
    with (folder / ADAPTER_WEIGHTS).open("wb") as file:
        file.write(encode_header((name, "F32", shape) for name, shape in shapes.items()))
        file.truncate(file.tell() + sum(map(math.prod, shapes.values())) * ITEM_BYTES["F32"])  # zeros
    return folder
