"""The teacher of a run (`algorithm.teacher`): a folder that the trainer loads, or a server that scores each batch.

Either way its tokenizer must be the policy's, which is checked before anything starts: it scores the policy's own ids.

    prepare_batch ─▶ train_step ─┬─ folder: the trainer scores the batch, as it does with a reference
                                 └─ server: `Teacher.score`, here in the main process ─▶ the batch and its scores

A server that does not answer is asked again. The step waits, rollouts go on, and nothing is lost: a run that gives up
or is interrupted meanwhile goes on, when resumed, from its last checkpoint.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from areal_agent.cluster.local import TOKENIZER, describe_model, obtain_model
from areal_agent.config import Config
from areal_agent.engine.scoring import ScoringServer
from areal_agent.errors import ConfigError, EngineError, EngineRejected, EngineUnreachable
from areal_agent.observe.progress import Progress
from areal_agent.rollout.tasks import HUB_NAME
from areal_agent.types import TokenRecord

PROBE = "Naïve café: 3 × 7 = 21,\n\tdef f(x): return {'a': [x, 1.5]}  # 你好, Привет 🙂\n"
MAX_CONCURRENT = 32
"""Records that a server is asked for at once."""
RETRY_S = 2.0


def require_same_vocabulary(model: Path, teacher: Path) -> Sequence[int]:
    """Return ids that both tokenizers make of a text, with the policy's highest id at the end.

    Every token of the policy must have the same id in the teacher, which may have more. Raises ConfigError.
    """
    ours, theirs = (_tokenizer(folder) for folder in (model, teacher))
    known, what = theirs.get_vocab(), f"algorithm.teacher: the tokenizer of {str(teacher)!r} is not that of the policy"
    remedy = "a teacher scores the policy's own token ids, so choose one of the same family"
    vocabulary = ours.get_vocab()
    in_order = sorted(vocabulary, key=lambda token: vocabulary[token])
    if foreign := next((token for token in in_order if known.get(token) != vocabulary[token]), None):
        has = f"is {known[foreign]} there" if foreign in known else "is missing there"
        raise ConfigError(f"{what}: {foreign!r} is {vocabulary[foreign]} in {str(model)!r} and {has}; {remedy}")
    ids, others = (one.encode(PROBE, add_special_tokens=False).ids for one in (ours, theirs))
    if ids != others:
        raise ConfigError(
            f"{what}: it cuts {PROBE[:18]!r}... into {others[:8]}, and the policy's into {ids[:8]}; {remedy}"
        )
    return [*ids, vocabulary[in_order[-1]]]


def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(
            f"algorithm.teacher: there is no {TOKENIZER} in {str(folder)!r}, so tokenizers cannot be compared; with a "
            "url, set algorithm.teacher.model to a folder here that has the teacher's tokenizer"
        )
    try:
        return Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(
            f"algorithm.teacher: {TOKENIZER} in {str(folder)!r} cannot be read: {error}; save the tokenizer there again"
        ) from None


async def obtain_teacher(config: Config, model: Path, logs: Path, progress: Progress) -> Path | None:
    """Return the folder that the trainer has to load; None without a teacher, and where a server has it.

    Raises ConfigError when it is not there, or does not suit the policy in the folder `model`.
    """
    teacher = config.algorithm.teacher
    if teacher is None or teacher.model is None or teacher.url is not None:
        return None
    folder = await obtain_model(teacher.model, config.seed, logs, progress)
    await asyncio.to_thread(require_same_vocabulary, model, folder)
    return folder


class Teacher:
    """A server that scores batches. It says by `note` when it has to wait, and raises EngineUnreachable in the end."""

    def __init__(
        self, server: ScoringServer, *, wait_s: float, note: Callable[[str], None], retry_s: float = RETRY_S
    ) -> None:
        self._server = server
        self._wait_s = wait_s
        self._note = note
        self._retry_s = retry_s
        self._is_away = False
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def score(self, records: Sequence[TokenRecord]) -> list[NDArray[np.float32]]:
        """Return the teacher's log-probabilities of each record's loss tokens, at their temperatures: [M] a record."""
        try:
            async with asyncio.TaskGroup() as group:
                scores = [group.create_task(self._score(record)) for record in records]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [one.result() for one in scores]

    async def _score(self, record: TokenRecord) -> NDArray[np.float32]:
        if record.images:
            raise ConfigError(
                "algorithm.teacher.url: a server scores text alone, and the policy was shown an image; give the "
                "trainer a teacher's folder instead (algorithm.teacher.model)"
            )
        places = np.flatnonzero(record.loss_mask)
        scores = np.zeros(len(places), dtype=np.float32)
        temperatures = record.temperatures[places]
        for temperature in np.unique(temperatures):
            ids, before = record.token_ids[: places[-1] + 1].tolist(), int(places[0]) - 1
            async with self._slots:
                found = await self._patiently(ids, before, float(temperature))
            is_at = temperatures == temperature
            scores[is_at] = np.array(found, dtype=np.float32)[places[is_at] - before - 1]
        return scores

    async def _patiently(self, ids: Sequence[int], start: int, temperature: float) -> Sequence[float]:
        """Ask until there is an answer, for `wait_s` at most."""
        cause = "it does not answer"
        try:
            async with asyncio.timeout(self._wait_s):
                while True:
                    try:
                        found = await self._server.score(ids, start, temperature)
                    except EngineUnreachable as error:
                        cause = str(error)
                        if not self._is_away:
                            self._note(f"the train step waits up to {self._wait_s:g} s for its teacher: {cause}")
                        self._is_away = True
                        await asyncio.sleep(self._retry_s)
                    except EngineRejected as error:
                        raise EngineRejected(
                            f"the teacher at {self._server.url} refuses to score {len(ids)} tokens: {error}"
                        ) from error
                    else:
                        if self._is_away:
                            self._note(f"the teacher at {self._server.url} answers again")
                        self._is_away = False
                        return found
        except TimeoutError:
            raise EngineUnreachable(
                f"the teacher gave no scores within algorithm.teacher.wait_s = {self._wait_s:g} s: {cause}; start it "
                "again"
            ) from None


@asynccontextmanager
async def open_teacher(config: Config, model: Path, note: Callable[[str], None]) -> AsyncGenerator[Teacher | None]:
    """Connect to the server of `algorithm.teacher.url`, which must score the ids of the policy in the folder `model`.

    None without such a server. Raises ConfigError.
    """
    teacher = config.algorithm.teacher
    if teacher is None or teacher.url is None:
        yield None
        return
    async with AsyncExitStack() as stack:
        try:
            server = await ScoringServer.connect(teacher.url)
            stack.push_async_callback(server.aclose)
            folder = await _described(teacher.model or await server.model(), config.seed)
            probe = await asyncio.to_thread(require_same_vocabulary, model, folder)
            await server.score(probe, 0, config.rollout.temperature)
        except EngineError as error:
            raise ConfigError(f"algorithm.teacher.url: {error}") from error
        yield Teacher(server, wait_s=teacher.wait_s, note=note)


async def _described(source: str, seed: int) -> Path:
    """Return the folder with a tokenizer that a config or a server names, by a path or by a name on the hub."""
    folder = Path(source)
    if await asyncio.to_thread(folder.is_dir) or not HUB_NAME.fullmatch(source):
        return folder
    return await describe_model(source, seed) or folder
