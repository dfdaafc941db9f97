"""One rank of a trainer as a worker: it carries out commands, and rank 0 has all ranks carry them out together.

A command is a `Frame`: its name, its arguments and a step's records, of which rank 0 hands out shares (step.py). A
run's commands come over a socket (`serve`); supervised fine-tuning calls the worker of rank 0 in its own process
(`call`).
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import torch

from areal_agent.callback import LOOPBACK
from areal_agent.trainer.checkpoint import Checkpoint
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.model import choose_device
from areal_agent.trainer.ranks import ALONE, Group, Ranks
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import (
    Arrays,
    Frame,
    StepInput,
    decode_records,
    decode_teacher,
    describe_error,
    encode_records,
    read_frame,
)
from areal_agent.types import JsonObject, TokenRecord

logger = logging.getLogger(__name__)


class Worker:
    """Carries out commands one after the other, as one rank of a trainer. `init` loads the model.

    `address` is that of this machine at which servers find this rank.
    """

    def __init__(self, rank: int = 0, address: str = LOOPBACK) -> None:
        self._rank = rank
        self._address = address
        self._ranks = Ranks([])
        self._trainer: Trainer | None = None
        self._is_done = False

    def call(self, command: str, arguments: JsonObject, records: Sequence[TokenRecord] = ()) -> JsonObject:
        """Carry out a command on all ranks, from their own process: no socket. Raises the error of whichever failed."""
        names, arrays = encode_records(records)
        header = {"number": 0, "command": command, **arguments, "records": names}
        return self._together(Frame(header=header, arrays=arrays))

    def close(self) -> None:
        """Close the trainer and end the other ranks. Harmless when closed before."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        self._ranks.close()

    def serve(self, sock: socket.socket) -> None:
        """Answer commands until `shutdown` or until the other side is gone."""
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
                given = decode_records(arguments["records"], request.arrays)
                report = self._ready().fit(arguments["step"], given, rate=arguments["rate"])
                return {"metrics": report.metrics, "seconds": report.seconds}
            case "measure":
                measured = self._ready().measure(decode_records(arguments["records"], request.arrays))
                return {"logprobs": [] if self._rank else [one.tolist() for one in measured]}
            case "publish":
                published = self._ready().publish()
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
        """Start the other ranks, and add to the command the file at which all of them meet."""
        if self._trainer is not None:
            raise ValueError("init was sent twice; a trainer process loads only one model, so start another")
        setup = TrainerSetup.model_validate(init.header["setup"])
        self._ranks = Ranks.start(setup.trainer.num_ranks - 1)
        rendezvous = setup.shared_memory / f"ranks-{os.getpid()}"
        return replace(init, header={**init.header, "rendezvous": str(rendezvous)})

    def _init(self, arguments: JsonObject) -> JsonObject:
        setup = TrainerSetup.model_validate(arguments["setup"])
        config = setup.trainer
        torch.set_num_threads(config.threads)
        device = choose_device(config.device, rank=self._rank, num_ranks=config.num_ranks)
        group = ALONE
        if config.num_ranks > 1:
            where = Path(arguments["rendezvous"])
            meshes = {"context_parallel": config.context_parallel, "replicas": config.replicas}
            group = Group.join(self._rank, config.num_ranks, where, device, **meshes)
        self._trainer = Trainer(setup, device=device, group=group, address=self._address)
        info = self._trainer.info
        logger.info("loaded %s: %d parameters on %s", setup.model, info.num_parameters, info.device)
        return asdict(replace(info, rank_process_ids=self._ranks.process_ids))

    def _train_step(self, arguments: JsonObject, arrays: Arrays) -> JsonObject:
        records = decode_records(arguments["records"], arrays)
        given = StepInput(
            step=arguments["step"],
            records=records,
            rewards=arguments["rewards"],
            parts=arguments["parts"],
            incarnation=arguments["incarnation"],
            teacher=decode_teacher(records, arrays),
        )
        report = self._ready().train_step(given)
        return {"metrics": report.metrics, "seconds": report.seconds}

    def _ready(self) -> Trainer:
        if self._trainer is None:
            raise ValueError("no model is loaded; send init first, and check that it succeeds")
        return self._trainer


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
