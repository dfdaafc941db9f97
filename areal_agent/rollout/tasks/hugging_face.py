"""Rows of Hugging Face data sets, from a folder on this machine or by name from the hub. Needs the extra `datasets`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from areal_agent.errors import ConfigError
from areal_agent.rollout.tasks.config import one_line


def dataset_rows(source: str, split: str, args: Mapping[str, Any], what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a dict per row. `args` go to `load_dataset`. Raises ConfigError when data set or split cannot be read."""
    dataset = _open(source, split, args, what)
    return ((f"{source} [{split}] row {number}", dict(row)) for number, row in enumerate(dataset))


def _open(source: str, split: str, args: Mapping[str, Any], what: str) -> Dataset:
    folder = Path(source)
    is_local = folder.is_dir()
    try:
        if is_local and _is_saved(folder):
            return _split_of(load_from_disk(source, **args), source, split, what)
        return load_dataset(source, split=split, **args)
    except ConfigError:
        raise
    except Exception as error:  # a hub, a cache or a file format may fail in any way
        where = "" if is_local else "there is no such folder, and "
        raise ConfigError(
            f"{what}: {where}loading the data set {source!r}, split {split!r}, failed: {one_line(error)}"
        ) from error


def _is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote it; otherwise it is a folder of data files."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _split_of(saved: Dataset | DatasetDict, source: str, split: str, what: str) -> Dataset:
    """Return a split. A data set saved without splits counts as `train`: nothing is evaluated on what is trained."""
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if split not in splits:
        raise ConfigError(f"{what}: {source!r} has no split {split!r}; give one of {', '.join(map(str, splits))}")
    return splits[split]
