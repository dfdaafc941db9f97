"""One rank of a trainer as a worker: it carries out commands, and rank 0 has all ranks carry them out together.

A command is a `Frame`: its name, its arguments and a step's records, of which rank 0 hands out shares (step.py). A
run's commands come over a socket (`serve`); supervised fine-tuning calls the worker of rank 0 in its own process
(`call`).
"""

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NoReturn

import torch

from areal_agent.algorithms.batching import NO_IMAGES
from areal_agent.callback import LOOPBACK
from areal_agent.engine.embedded.transfer import connect, open_store
from areal_agent.trainer.checkpoint import Checkpoint
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.digests import input_digests
from areal_agent.trainer.model import choose_device
from areal_agent.trainer.ranks import ALONE, STALLED_S, Group, Ranks
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import (
    Arrays,
    Frame,
    RankCall,
    StepInput,
    TrainerInfo,
    decode_images,
    decode_records,
    decode_step,
    describe_error,
    encode_images,
    encode_records,
    encode_step,
    read_frame,
)
from areal_agent.types import JsonObject, TokenRecord

logger = logging.getLogger(__name__)


class Worker:
    """Carries out commands one after the other, as one rank of a trainer. `init` loads the model.

    With several ranks, rank 0 is asked first what to start (`expect`). `address` is that of this machine at which
    ranks and servers find this one.
    """

    def __init__(self, rank: int = 0, address: str = LOOPBACK) -> None:
        self._rank = rank
        self._address = address
        self._ranks = Ranks()
        self.are_expected: Callable[[], bool] = lambda: True  # the calls of the other ranks; else `init` fails
        self._trainer: Trainer | None = None
        self._is_done = False

    def expect(self, num_ranks: int) -> Sequence[RankCall]:
        """Listen for the calls of the other ranks; return how they have to be started. `init` waits for them."""
        self._ranks = Ranks.expect(num_ranks - 1, self._address)
        return self._ranks.calls

    def call(
        self,
        command: str,
        arguments: JsonObject,
        records: Sequence[TokenRecord] = (),
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> JsonObject:
        """Carry out a command on all ranks, from their own process: no socket. Raises the error of whichever failed."""
        names, arrays = encode_records(records)
        header = {"number": 0, "command": command, **arguments, "records": names}
        return self._together(Frame(header=header, arrays={**arrays, **encode_images(images)}))

    @property
    def info(self) -> TrainerInfo:
        return self._ready().info

    def train_step(self, given: StepInput) -> JsonObject:
        """Carry out a train step as `call` does; the answer has the fields of a `StepReport`."""
        arguments, arrays = encode_step(given)
        return self._together(Frame(header={"number": 0, "command": "train_step", **arguments}, arrays=arrays))

    def close(self) -> None:
        """Close the trainer and end the other ranks. Harmless when closed before."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        self._ranks.close()

    def serve(self, sock: socket.socket) -> None:
        """Answer commands until `shutdown` or until the other side is gone."""
        if self._rank:
            threading.Thread(target=_exit_when_closed, args=(sock,), name="rank 0", daemon=True).start()
        try:
            with sock.makefile("rwb") as file:
                while not self._is_done:
                    self._answer(file)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logger.info("the other side is gone; exiting")
        finally:
            self.close()

    def _answer(self, file: BufferedRWPair) -> None:
        request = read_frame(file)
        number = request.header["number"]
        try:
            answer: dict[str, Any] = {"number": number, "result": self._together(request)}
        except Exception as error:  # the boundary that turns a failure into an answer; rank 0 keeps running
            logger.exception("the command %r failed", request.header.get("command"))
            answer = {"number": number, "error": describe_error(error)}
            self._is_done = self._rank > 0  # the other ranks exit, which releases those that wait for them
        file.write(Frame(header=answer).encode())
        file.flush()

    def _together(self, request: Frame) -> JsonObject:
        """Carry out a command on all ranks. On shutdown the other ranks exit when their sockets close."""
        command = request.header["command"]
        if command == "shutdown":
            self._is_done = True
            return {}
        if command == "expect":
            return {"calls": [asdict(call) for call in self.expect(request.header["num_ranks"])]}
        if command == "init" and self._rank == 0:
            request = self._with_ranks(request)
        with self._ranks.taking_part(_without_records(request)):
            return self._carry_out(request)

    def _carry_out(self, request: Frame) -> JsonObject:
        arguments = request.header
        match arguments["command"]:
            case "init":
                return self._init(arguments)
            case "train_step":
                return self._train_step(arguments, request.arrays)
            case "fit":
                given, images = decode_records(arguments["records"], request.arrays), decode_images(request.arrays)
                report = self._ready().fit(arguments["step"], given, rate=arguments["rate"], images=images)
                return {"metrics": report.metrics, "seconds": report.seconds}
            case "measure":
                given, images = decode_records(arguments["records"], request.arrays), decode_images(request.arrays)
                measured = self._ready().measure(given, images)
                return {"logprobs": [] if self._rank else [one.tolist() for one in measured]}
            case "publish":
                published = self._ready().publish(through_host=arguments.get("through_host", False))
                return asdict(published) if published else {}
            case "save":
                directory, names = Path(arguments["directory"]), ("step", "incarnation", "run_state")
                save = partial(self._ready().save, directory, **{name: arguments[name] for name in names})
                return _end_of(save)
            case "saved":
                return _end_of(self._ready().saver.ended)
            case unknown:
                raise ValueError(f"unknown command {unknown!r}")

    def _with_ranks(self, init: Frame) -> Frame:
        """Wait for the other ranks, and add to the command the port of the store at which all of them meet."""
        if self._trainer is not None:
            raise ValueError("init was sent twice; a trainer process loads only one model, so start another")
        setup = TrainerSetup.model_validate(init.header["setup"])
        if len(self._ranks) != setup.trainer.num_ranks - 1:
            raise ValueError(f"trainer.num_ranks is {setup.trainer.num_ranks}, but `expect` did not come before init")
        if not self._ranks:
            return init
        self._ranks.accept(self.are_expected)
        self._store = open_store(self._address, setup.trainer.startup_timeout_s)
        return replace(init, header={**init.header, "host": self._address, "port": self._store.port})

    def _init(self, arguments: JsonObject) -> JsonObject:
        setup = TrainerSetup.model_validate(arguments["setup"])
        config = setup.trainer
        torch.set_num_threads(config.num_threads)
        rank, num_gpus = (0, 1) if setup.has_one_gpu else (self._rank, config.num_ranks)
        device = choose_device(config.device, rank=rank, num_ranks=num_gpus)
        group = ALONE
        if config.num_ranks > 1:
            limit_s = config.startup_timeout_s
            group = Group.join(
                self._rank,
                config.num_ranks,
                connect(arguments["host"], arguments["port"], limit_s) if self._rank else self._store,
                device,
                context_parallel=config.context_parallel,
                replicas=config.replicas,
                address=self._address,
                timeout_s=max(STALLED_S, limit_s),
            )
        self._trainer = Trainer(setup, device=device, group=group, address=self._address)
        info = self._trainer.info
        logger.info("loaded %s: %d parameters on %s", setup.model, info.num_parameters, info.device)
        return asdict(info)

    def _train_step(self, arguments: JsonObject, arrays: Arrays) -> JsonObject:
        report = self._ready().train_step(decode_step(arguments, arrays))
        digests = {} if self._rank else input_digests(arguments, arrays)
        return {"metrics": report.metrics, "seconds": report.seconds, "weights": report.weights, "inputs": digests}

    def _ready(self) -> Trainer:
        if self._trainer is None:
            raise ValueError("no model is loaded; send init first, and check that it succeeds")
        return self._trainer


def _exit_when_closed(sock: socket.socket) -> NoReturn:
    """End this process once rank 0 has closed its end: it may wait for rank 0 in a collective, for ever."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))  # macOS tells of it unasked
    poll.poll()
    os._exit(0)


def _end_of(save: Callable[[], Checkpoint | None]) -> JsonObject:
    """Return how a save has ended; nothing while it is under way. A disk that fails leaves the ranks as they are."""
    try:
        saved = save()
    except OSError as error:
        logger.warning("a checkpoint could not be written", exc_info=error)
        return {"fault": str(error)}
    return {"path": str(saved.path)} if saved else {}


def _without_records(request: Frame) -> Frame:
    """Return a command as the other ranks need it: they get shares of the records from rank 0 as it goes on."""
    if "records" not in request.header:
        return request
    return Frame(header={**request.header, "records": [], "rewards": {}, "parts": {}})
