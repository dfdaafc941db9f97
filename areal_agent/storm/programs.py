"""The simulated programs of a run: engines, a trainer, workers, and the agent. Around them everything is the product.

The weights are the list of the trained sessions, so a checkpoint tells what it was trained on. An engine samples
letters that stand for the weights in it, so each token of the ledger tells which weights sampled it.
"""

import asyncio
import contextlib
import contextvars
import importlib
import itertools
import logging
import random
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from openai import AsyncOpenAI

from areal_agent.callback import announce
from areal_agent.engine.client import HEALTH_TIMEOUT_S
from areal_agent.engine.fake import FakeEngine, VirtualClock
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import Patience
from areal_agent.engine.transport import CONTROL_TIMEOUT_S
from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import EngineUnreachable, ProcessDied, Reject, TrainerError, WeightUpdateError
from areal_agent.files import newest_claim
from areal_agent.storm.machine import PROGRAM, Main, Program, are_apart
from areal_agent.storm.truth import Truth, digest_of, letter_of
from areal_agent.trainer.checkpoint import CommitPoint, publish_checkpoint
from areal_agent.trainer.wire import Frame, decode_step, describe_error, receive_frame
from areal_agent.types import DiskWeights, EngineInfo, GenerateRequest, JsonObject, PauseMode, Weights, WeightVersion

logger = logging.getLogger(__name__)

importlib.import_module("openai.resources.responses")  # once, not in the process of each story

LINEAGE = "lineage.json"
VOCAB_SIZE = 512
CONTEXT_TOKENS = 4096
STEP_S, PUBLISH_S, SAVE_S = 4.0, 0.2, 0.5
"""What a train step, a publication and a save take."""
SLOW_WRITES = 4
"""The writes of a save for which a slow disk is waited."""

T = TypeVar("T")


MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
}
"""The config.json of the model: a run looks at it before it starts, and nobody loads it."""


def write_model(folder: Path) -> None:
    """Write a model that was trained on nothing, beside its tokenizer."""
    (folder / "config.json").write_bytes(orjson.dumps(MODEL))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / LINEAGE).write_bytes(b"[]")


def lineage_in(folder: Path) -> list[str]:
    """Return what the weights in a model's folder were trained on."""
    return orjson.loads((folder / LINEAGE).read_bytes())


# ------------------------------------------------------------------------------------------------------- engines


class _Ticks(VirtualClock):
    """The loop's clock for one engine, whose ticks are its own program's."""

    def __init__(self, context: contextvars.Context) -> None:
        super().__init__()
        self._context = context

    def call_later(self, delay_s: float, action: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(delay_s, action, context=self._context)


class StormEngine(FakeEngine):
    """One engine's process. Each token is the letter of the weights that are in it."""

    def __init__(
        self, url: str, truth: Truth, ids: Mapping[str, int], end_id: int, weights: str, version: WeightVersion
    ) -> None:
        super().__init__(
            self._reply,
            version=version,
            vocab_size=VOCAB_SIZE,
            max_context_tokens=CONTEXT_TOKENS,
            clock=_Ticks(contextvars.copy_context()),
            token_s=0.05,
        )
        self.url = url
        self.program = PROGRAM.get()
        self.slow = 1.0
        self.damaged: list[Callable[[], object]] = []  # what to call as the next weights arrive damaged
        self._truth, self._ids, self._end_id = truth, ids, end_id
        self._weights_now = weights
        self._usual_token_s = self._token_s
        truth.serves(version, weights)

    def _reply(self, request: GenerateRequest) -> list[int]:
        return [0] * (1 + (request.sampling.seed or 0) % 24) + [self._end_id]

    def step(self, num_tokens: int = 1) -> int:
        letter = self._ids[letter_of(self._weights_now)]
        for row in self._running.values():
            reply: Any = row.reply  # a list of its own
            for i in range(len(row.versions), min(len(row.versions) + num_tokens, len(reply))):
                if reply[i] != self._end_id:
                    reply[i] = letter
        self._token_s = self._usual_token_s * self.slow
        return super().step(num_tokens)

    async def take(self, weights: Weights) -> Weights:
        assert isinstance(weights, DiskWeights)
        await asyncio.sleep(PUBLISH_S)
        if self.damaged:
            self.damaged.pop(0)()
            raise WeightUpdateError("the weights do not match their digests")
        try:
            return DiskWeights(path=digest_of(lineage_in(Path(weights.path))))
        except FileNotFoundError:
            raise WeightUpdateError(f"{weights.path} has been removed") from None

    async def swap(self, taken: Weights, version: WeightVersion, *, flush_cache: bool) -> None:
        assert isinstance(taken, DiskWeights)
        self._weights_now = taken.path
        self._truth.serves(version, taken.path)
        await super().swap(taken, version, flush_cache=flush_cache)

    async def load(self, model: Path, version: WeightVersion) -> None:
        await self.swap(DiskWeights(path=digest_of(lineage_in(model))), version, flush_cache=True)


class EngineLink:
    """One program's client of the engine at a URL, a `MemberEngine`: it is cut while the network between them is."""

    def __init__(self, url: str, network: "Network") -> None:
        self.base_url = url
        self._network = network

    async def _call(
        self, call: Callable[[StormEngine], Coroutine[Any, Any, T]], limit_s: float | None = CONTROL_TIMEOUT_S
    ) -> T:
        try:
            async with asyncio.timeout(limit_s):
                engine = await self._there()
                answer = await self._ask(engine, call)
                if await self._there() is not engine or self._network.loses(self.base_url):
                    raise EngineUnreachable(f"the connection to {self.base_url} broke before it answered")
                return answer
        except TimeoutError:
            raise EngineUnreachable(f"{self.base_url} has not answered within {limit_s:g} s") from None

    async def _ask(self, engine: StormEngine, call: Callable[[StormEngine], Coroutine[Any, Any, T]]) -> T:
        """Return the engine's answer; where the message comes twice, one of its two answers."""
        if not self._network.repeats(self.base_url):
            return await call(engine)
        answer = random.choice(await asyncio.gather(call(engine), call(engine), return_exceptions=True))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _there(self) -> StormEngine:
        """Return the engine once it can be reached. Raises EngineUnreachable where nobody listens."""
        await asyncio.sleep(self._network.latency_s())
        while self._network.is_silent(PROGRAM.get(), self.base_url):  # noqa: ASYNC110 (a network tells nobody)
            await asyncio.sleep(0.5)
        engine = self._network.engines.get(self.base_url)
        if engine is None or engine.program.is_dead:
            raise EngineUnreachable(f"nobody listens at {self.base_url}")
        return engine

    async def generate(self, request: GenerateRequest, on_chunk: Any = None) -> Any:
        return await self._call(lambda engine: engine.generate(request, on_chunk), limit_s=None)

    async def abort(self, request_id: str) -> None:
        await self._call(lambda engine: engine.abort(request_id))

    async def pause(self, mode: PauseMode) -> None:
        await self._call(lambda engine: engine.pause(mode), None if mode is PauseMode.WAIT else CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._call(lambda engine: engine.resume())

    async def begin_push(self, push_id: str) -> None:
        await self._call(lambda engine: engine.begin_push(push_id))

    async def send_push(self, push_id: str, weights: Weights) -> None:
        await self._call(lambda engine: engine.send_push(push_id, weights))

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        await self._call(lambda engine: engine.commit_push(push_id, version))

    async def abort_push(self, push_id: str) -> None:
        await self._call(lambda engine: engine.abort_push(push_id))

    async def load(self, model: Path, version: WeightVersion) -> None:
        await self._call(lambda engine: engine.load(model, version))

    async def info(self) -> EngineInfo:
        async def told(engine: StormEngine) -> EngineInfo:
            return engine.info()

        return await self._call(told)

    async def stats(self) -> EngineStats:
        return await self._call(_stats_of)

    async def health(self) -> bool:
        with contextlib.suppress(EngineUnreachable):
            await self._call(_stats_of, HEALTH_TIMEOUT_S)
            return True
        return False

    async def wait_ready(self, timeout_s: float) -> None:
        await self._call(_stats_of, timeout_s)

    async def aclose(self) -> None:
        pass


async def _stats_of(engine: StormEngine) -> EngineStats:
    return EngineStats(
        num_running=engine.num_in_flight,
        num_queued=0,
        busy_s=None,
        generated_tokens=None,
        weight_version=engine.version,
    )


class Network:
    """What lies between the programs and the engines."""

    def __init__(self) -> None:
        self.engines: dict[str, StormEngine] = {}  # by URL
        self.free_ports = itertools.count(9000)
        self.cut: dict[tuple[str, str], float] = {}  # by program and URL: until when, by the loop's clock
        self.lost: Counter[str] = Counter()  # by URL: how many of the next answers never arrive
        self.repeated: Counter[str] = Counter()  # by URL: how many of the next messages arrive twice
        self.late_until_s = 0.0

    def is_silent(self, program: Program, url: str) -> bool:
        """Return whether what `program` asks there gets no answer now."""
        engine = self.engines.get(url)
        is_away = engine is not None and (engine.program.is_stopped or are_apart(program, engine.program))
        return is_away or self.cut.get((program.name, url), 0.0) > asyncio.get_running_loop().time()

    def loses(self, url: str) -> bool:
        """Return whether the answer that has just been made there is lost."""
        is_lost = self.lost[url] > 0
        self.lost[url] -= is_lost
        return is_lost

    def repeats(self, url: str) -> bool:
        """Return whether the message that has just arrived there arrives twice."""
        is_repeated = self.repeated[url] > 0
        self.repeated[url] -= is_repeated
        return is_repeated

    def latency_s(self) -> float:
        """Return how long the next message takes: for a while some take seconds, and overtake each other."""
        is_late = asyncio.get_running_loop().time() < self.late_until_s
        return random.uniform(0.0, 3.0) if is_late else 0.001

    def connect(self, address: Any) -> Fleet:
        """Do what `EngineAddress.connect` does."""
        patience = Patience(hung_after_s=address.hung_after_s, wait_s=address.wait_s)
        return Fleet(address.urls, lambda url: EngineLink(url, self), patience=patience, streams_alone=True)


def engine_main(truth: Truth, network: Network, ids: Mapping[str, int], *, end_id: int) -> Main:
    """Return the main function of an engine's process."""

    async def main(argv: Sequence[str], sock: socket.socket) -> None:
        options = dict(zip(argv[3::2], argv[4::2], strict=True))
        port = int(options["--port"]) or next(network.free_ports)
        url = f"http://{options['--host']}:{port}"
        await asyncio.sleep(1.0)
        try:
            weights = digest_of(lineage_in(Path(options["--model"])))
        except FileNotFoundError:
            if not _is_closed(sock):
                raise
            raise ProcessDied("its machine stood still, and its run is gone with its model") from None
        engine = StormEngine(url, truth, ids, end_id, weights, WeightVersion.parse(options["--weight-version"]))
        network.engines[url] = engine
        engine.program.owned.append(lambda: engine.die_after(0))
        try:
            announce(url, sock)
            await asyncio.get_running_loop().create_future()
        finally:
            engine.die_after(0)

    return main


def _is_closed(sock: socket.socket) -> bool:
    """Return whether the other end is gone."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# ------------------------------------------------------------------------------------------------------- trainer


class Stopped(BaseException):
    """The run was killed at a point of a save: what follows must not happen."""


def trainer_main(
    truth: Truth, passing: Callable[[CommitPoint], None], disk_fault: Callable[[], None], delay_s: Callable[[], float]
) -> Main:
    """Return the main function of the trainer's process. `passing` may raise Stopped, `disk_fault` OSError.

    `delay_s` says how long a disk takes that is slow.
    """

    async def main(argv: Sequence[str], sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        trainer = _Trainer(truth, passing, disk_fault, delay_s)
        with contextlib.suppress(EOFError, OSError):
            while True:
                request = await receive_frame(reader)
                answer: dict[str, Any] = {"number": request.header["number"]}
                try:
                    answer["result"] = await trainer.carry_out(request)
                except Exception as error:
                    logger.exception("the trainer failed")
                    answer["error"] = describe_error(error)
                writer.write(Frame(header=answer).encode())

    return main


class _Trainer:
    def __init__(
        self,
        truth: Truth,
        passing: Callable[[CommitPoint], None],
        disk_fault: Callable[[], None],
        delay_s: Callable[[], float],
    ) -> None:
        self._truth, self._passing, self._disk_fault, self._delay_s = truth, passing, disk_fault, delay_s
        self._lineage: list[str] = []
        self._shared = self._begun_with = Path()
        self._num_published = 0
        self._is_async = False
        self._saving: asyncio.Task[dict[str, Any]] | None = None

    async def carry_out(self, request: Frame) -> dict[str, Any]:
        given = request.header
        match given["command"]:
            case "init":
                self._lineage = lineage_in(Path(given["setup"]["model"]))
                self._shared = Path(given["setup"]["shared_memory"])
                self._begun_with = Path(given["setup"]["model"])
                self._is_async = given["setup"]["trainer"]["async_save"] is True
                return {
                    "step": 0,
                    "num_parameters": 1,
                    "device": "cpu",
                    "weights": digest_of(self._lineage),
                    "frozen": "",
                    "numerics": {},
                }
            case "train_step":
                step = decode_step(given, request.arrays)
                await asyncio.sleep(STEP_S)
                self._truth.trains(step)
                self._lineage += dict.fromkeys(record.session_id for record in step.records)
                return {"metrics": {}, "seconds": STEP_S, "inputs": {}, "weights": digest_of(self._lineage)}
            case "publish":
                await asyncio.sleep(PUBLISH_S)
                self._num_published += 1
                if not self._shared.exists():
                    raise TrainerError("the run has removed its folder: it has ended")
                folder = self._shared / f"weights_{self._num_published}"  # as weights/channels.py does it
                folder.mkdir()
                (folder / LINEAGE).write_bytes(orjson.dumps(self._lineage))
                shutil.rmtree(self._shared / f"weights_{self._num_published - 2}", ignore_errors=True)
                return {"path": str(folder)}
            case "save" if self._is_async:
                while self._saving is not None and not self._saving.done():
                    await asyncio.wait({self._saving})
                self._saving = asyncio.create_task(self._save(given, list(self._lineage)))
                return {}
            case "save":
                return await self._save(given, self._lineage)
            case "saved":
                assert self._saving is not None
                return self._saving.result() if self._saving.done() else {}
            case unknown:
                raise ValueError(f"unknown command {unknown!r}")

    async def _save(self, given: JsonObject, lineage: Sequence[str]) -> dict[str, Any]:
        def write(folder: Path) -> None:
            self._disk_fault()
            (folder / LINEAGE).write_bytes(orjson.dumps(lineage))

        await asyncio.sleep(SAVE_S + SLOW_WRITES * self._delay_s())
        try:
            saved = publish_checkpoint(
                Path(given["directory"]),
                step=given["step"],
                incarnation=given["incarnation"],
                run_state=given["run_state"],
                write=write,
                keep_last=2,
                begun_with=self._begun_with,
                passing=self._passing,
            )
        except OSError as error:
            return {"fault": str(error)}
        if newest_claim(Path(given["directory"])) > given["incarnation"]:
            self._truth.faults.append(f"the checkpoint of step {saved.step} is published after its run was taken over")
        return {"path": str(saved.path)}


# --------------------------------------------------------------------------------------------------------- agent

ASKED = "What comes next?"
truth_now: list[Truth] = []
"""The truth of the story that this process tells, for the workflow, which a worker finds by its name."""


async def act(task: Any, rollout: Any) -> float | None:
    """Take one to four turns over one protocol with tools between them, some in another role; now and then fail."""
    draw = rollout.seed
    ask = (_by_chat, _by_responses, _by_messages)[(draw >> 40) % 3]
    messages: list[Any] = [{"role": "user", "content": f"{task['id']}: {ASKED}"}]
    other = await rollout.role("other") if (draw >> 32) % 3 == 0 else None
    if other is not None:
        other.reward(float((draw >> 25) % 2))
    for turn in range(1 + draw % 4):
        speaker = rollout if other is None or turn % 2 == 0 else other
        completion_id, text = await ask(speaker.client, rollout.model, messages, (draw >> turn) % 2 == 0)
        truth_now[0].answered(completion_id)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": ASKED}]
        await asyncio.sleep((draw >> 8) % 7)
        if turn == 1 and (draw >> 16) % 23 == 0:
            raise RuntimeError("a tool broke")
        if turn == 1 and (draw >> 16) % 29 == 0:
            await asyncio.sleep(10_000.0)
        if turn == 1 and (draw >> 16) % 31 == 0:
            raise Reject("too easy")
    if (draw >> 16) % 37 == 0:
        return None
    return float((draw >> 24) % 2)


CUT_SHORT = "a stream ended with neither an answer nor an error"


async def _by_chat(client: AsyncOpenAI, model: str, messages: Any, is_streamed: bool) -> tuple[str, str]:
    """Return the id and the text of the answer."""
    if not is_streamed:
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.id, answer.choices[0].message.content or ""
    text = ""
    async for chunk in await client.chat.completions.create(model=model, messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason is not None:
            return chunk.id, text
    truth_now[0].faults.append(CUT_SHORT)
    raise EOFError(CUT_SHORT)


async def _by_responses(client: AsyncOpenAI, model: str, messages: Any, is_streamed: bool) -> tuple[str, str]:
    if not is_streamed:
        answer = await client.responses.create(model=model, input=messages)
        return answer.id, answer.output_text
    events: Any = await client.responses.create(model=model, input=messages, stream=True)
    async for event in events:
        if event.type in ("response.completed", "response.incomplete"):
            return event.response.id, event.response.output_text
        if event.type == "response.failed":
            raise RuntimeError(f"no answer: {event.response.error}")
    truth_now[0].faults.append(CUT_SHORT)
    raise EOFError(CUT_SHORT)


async def _by_messages(client: AsyncOpenAI, model: str, messages: Any, is_streamed: bool) -> tuple[str, str]:
    """The openai client reads no stream of this protocol."""
    asked = {"model": model, "messages": messages, "max_tokens": CONTEXT_TOKENS}
    answer = await client.post("/messages", body=asked, cast_to=dict[str, Any])
    return answer["id"], "".join(part["text"] for part in answer["content"])
