"""What a model computes in where `engine.dtype` or `trainer.dtype` is `auto`. Imports no torch.

A GPU computes in bfloat16. A CPU does if it multiplies bfloat16 natively and the model is large enough to gain.
"""

from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "bfloat16"]
Computed = Literal["float32", "bfloat16"]

NATIVE = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""The flags by which Linux names instructions that multiply bfloat16: of x86 the first two, of ARM the last."""

LARGE = 512
"""The hidden size from which bfloat16 is chosen. Measured on a Xeon with AMX at 576 (SmolLM2-135M): products of 2,048
rows are 9 times as fast as in float32, of 16 rows 1.7 times. The quickstart's model has 192."""


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this machine's processor says that it has instructions for products of bfloat16."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not NATIVE.isdisjoint(flags.split())


def computed_in(choice: DType, hidden_size: int, *, is_gpu: bool) -> Computed:
    """Return what a model of this hidden size computes in on this machine.

    >>> computed_in("auto", 192, is_gpu=False), computed_in("auto", 192, is_gpu=True)
    ('float32', 'bfloat16')
    """
    if choice != "auto":
        return choice
    return "bfloat16" if is_gpu or (hidden_size >= LARGE and multiplies_bfloat16()) else "float32"


def slowness(key: str, dtype: str, *, is_gpu: bool) -> str:
    """Return a remark on a bfloat16 that `key` asks for and the processor has to imitate; nothing elsewhere."""
    if dtype != "bfloat16" or is_gpu or multiplies_bfloat16():
        return ""
    return (
        f"{key} is bfloat16, which works on this processor, but slowly: it has no instructions for it (AMX, "
        "AVX512-BF16); 'auto' takes float32 here"
    )
