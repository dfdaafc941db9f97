"""Folders of adapters in the format of PEFT, which a server applies to the model that it has loaded. No torch.

    adapter_config.json, adapter_model.safetensors

A server begins with adapters that change nothing, or with those of a checkpoint: what requests name has to be there
from the first one on. Knows no server and no versions.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from areal_agent.engine.fields import WireError, as_integer, as_object, decode_json, get
from areal_agent.engine.foreign.tensors import StoredTensor, encode_header, read_file_shapes, read_shapes
from areal_agent.errors import WeightUpdateError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT writes in front of the names that matrices have in the model."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterForm:
    """What adapters are, but for their numbers."""

    base: Path  # the model that they are for
    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def encode(self) -> bytes:
        """As PEFT has it."""
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
        """Of its matrices for a model of such tensors: A [R, I] and B [O, R] of each weight [O, I]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in model.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in self.target_modules and name != module and len(shape) == 2:
                shapes[f"{PREFIX}{module}.lora_A.weight"] = (self.rank, shape[1])
                shapes[f"{PREFIX}{module}.lora_B.weight"] = (shape[0], self.rank)
        return shapes


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_form(folder: Path) -> AdapterForm:
    """What the adapters of a folder are. Raises WeightUpdateError where its config does not say."""
    try:
        fields = as_object(decode_json((folder / CONFIG).read_bytes()), CONFIG)
        names: list[object] = get(fields, "target_modules", list)
        return AdapterForm(
            base=Path(get(fields, "base_model_name_or_path", str)),
            rank=as_integer(fields.get("r"), "r"),
            alpha=float(fields["lora_alpha"]),
            target_modules=tuple(map(str, names)),
        )
    except (OSError, KeyError, TypeError, ValueError, WireError) as error:
        raise WeightUpdateError(f"cannot read what the adapters in {str(folder)!r} are: {error}") from error


def prove_adapter(folder: Path, model: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightUpdateError unless these are adapters for a model of such tensors, all of them."""
    form = read_form(folder)
    expected, found = form.shapes(model), read_file_shapes(folder / WEIGHTS)
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise WeightUpdateError(
            f"the adapters in {str(folder)!r} are not those of rank {form.rank} for the engine's model: "
            f"{', '.join(wrong[:3])}; publish those of the model that the engine loaded"
        )


def begin_adapter(folder: Path, form: AdapterForm, saved: Path | None) -> Path:
    """Make `folder`: the adapters of a folder that was saved, or some that change nothing.

    Raises WeightUpdateError where the model cannot be read.
    """
    folder.mkdir()
    (folder / CONFIG).write_bytes(form.encode())
    if saved is not None:
        shutil.copyfile(saved / WEIGHTS, folder / WEIGHTS)
        return folder
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, (rows, columns) in form.shapes(read_shapes(form.base)).items():
        start, end = end, end + _FLOAT32_BYTES * rows * columns
        tensors[name] = StoredTensor(dtype="F32", shape=(rows, columns), start=start, end=end)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(encode_header(tensors))
        file.truncate(file.tell() + end)  # zeros
    return folder
