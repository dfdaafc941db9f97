"""The size of weights: pushed in memory, in a transfer, or as a folder with everything in it. A missing folder has size
0.
"""

from pathlib import Path

from areal_agent.engine.pushes import size_of
from areal_agent.types import DiskWeights, DistributedWeights, SharedMemoryWeights, TensorEntry

ENTRIES = tuple(
    TensorEntry(name=name, dtype="float32", shape=(3,), offset=start, num_bytes=12)
    for name, start in (("a", 0), ("b", 64))
)


def test_in_memory() -> None:
    assert size_of(SharedMemoryWeights(path="nowhere", entries=ENTRIES, crc32=0)) == 24


def test_of_a_transfer() -> None:
    weights = DistributedWeights(
        host="h", port=1, name="n", entries=ENTRIES, num_bytes=128, bucket_bytes=64, checksum=0, timeout_s=1.0
    )
    assert size_of(weights) == 128


def test_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for path in (tmp_path / "one", tmp_path / "inner" / "two"):
        path.write_bytes(bytes(50))
    assert size_of(DiskWeights(path=str(tmp_path))) == 100


def test_of_what_is_not_there(tmp_path: Path) -> None:
    assert size_of(DiskWeights(path=str(tmp_path / "nothing"))) == 0
