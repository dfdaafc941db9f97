"""The engine of fresh samples: one that runs, or a checkpoint of the run that is served for the while."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from areal_agent.cluster.engines import open_engine
from areal_agent.cluster.local import TOKENIZER, obtain_model
from areal_agent.engine.address import EngineAddress
from areal_agent.errors import ConfigError, EngineError
from areal_agent.observe.progress import Progress
from areal_agent.protocols import Sampler
from areal_agent.replay.saved import SavedRun
from areal_agent.trainer.checkpoint import latest_checkpoint
from areal_agent.types import EngineInfo, WeightVersion


class FreshEngine(NamedTuple):
    """An engine, what it says of itself, and its name in reports."""

    client: Sampler
    info: EngineInfo
    name: str


@asynccontextmanager
async def open_fresh_engine(
    run: SavedRun, url: str | None, model: Path | None, progress: Progress
) -> AsyncGenerator[FreshEngine]:
    """Connect to the engine at `url`, or serve `model`, by default the run's last checkpoint, on this machine.

    Raises ConfigError when it is not there, or when its tokenizer is not the run's.
    """
    if url is not None:
        try:
            address = await EngineAddress.of_server(url)
            client = address.model_copy(update={"do_others_push": True}).client()(url)
            info = await client.info()
        except EngineError as error:
            raise ConfigError(f"--engine: {error}") from error
        try:
            _require_same_tokenizer(run, Path(info.model_path))
            yield FreshEngine(client, info, url)
        finally:
            await client.aclose()
        return
    with tempfile.TemporaryDirectory(prefix="areal-agent-episode-") as logs:
        folder = model or await _newest_model(run, Path(logs), progress)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {str(folder)!r} is not a Hugging Face folder: it has no config.json")
        _require_same_tokenizer(run, folder)
        own = {"backend": "embedded", "urls": (), "num_servers": 1, "release_kv": False, "port": 0}
        config = run.config.engine.model_copy(update=own)
        progress.phase(f"serving {folder}")
        async with open_engine(config, folder, WeightVersion(), Path(logs)) as engine:
            yield FreshEngine(engine.client, await engine.client.info(), str(folder))


async def _newest_model(run: SavedRun, logs: Path, progress: Progress) -> Path:
    """Return the last checkpoint of the run; where there is none, the model that it began with."""
    checkpoint = latest_checkpoint(run.folder.checkpoints)
    if checkpoint is not None:
        return checkpoint.path
    if (run.folder.model / "config.json").is_file():
        return run.folder.model
    return await obtain_model(run.config.model, run.config.seed, logs, progress)


def _require_same_tokenizer(run: SavedRun, model: Path) -> None:
    ours, theirs = run.transcript.tokenizer, model / TOKENIZER
    if ours is None or not theirs.is_file():  # of a server on another machine: the gateway compares vocabularies
        return
    if (ours / TOKENIZER).read_bytes() != theirs.read_bytes():
        raise ConfigError(
            f"the tokenizer of model {str(model)!r} is not the run's, {str(ours)!r}: recorded tokens would mean other "
            "texts; name a checkpoint of this run, or another model of the same tokenizer"
        )
