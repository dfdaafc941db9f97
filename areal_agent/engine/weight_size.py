"""How many bytes a set of weights has, wherever it lies. It knows no server."""

from pathlib import Path

from areal_agent.engine_types import DiskWeights, DistributedWeights, Weights


def size_of(weights: Weights) -> int:
    """Of a push; what cannot be read here counts nothing, and whoever is to load it says why."""
    match weights:
        case DiskWeights():
            return size_of_folder(Path(weights.path))
        case DistributedWeights():
            return weights.num_bytes
        case _:
            return sum(entry.num_bytes for entry in weights.entries)


def size_of_folder(folder: Path) -> int:
    """Of all files in it."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0
