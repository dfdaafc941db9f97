"""The trainer process, `python -m areal_agent.trainer --connect HOST:PORT`: it carries out commands and answers them.

A run starts it and is called back at that address (callback.py). A failure is an answer too. The process ends with the
command `shutdown`, or when the other side closes its end. With `trainer.num_ranks` above 1, rank 0 starts the other
ranks (`--rank K`) and forwards every command to them; those exit when a command fails.
"""

import logging
import os
import socket
from dataclasses import asdict, replace
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from areal_agent.callback import call_back
from areal_agent.command import Parser, run_command
from areal_agent.process import exit_with_parent
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
    read_frame,
)
from areal_agent.types import JsonObject

logger = logging.getLogger(__name__)


def main() -> int:
    parser = Parser(
        prog="python -m areal_agent.trainer", description="The trainer process of a run; `areal_agent.train` starts it."
    )
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where commands come from")
    parser.add_argument(
        "--rank", type=int, default=0, help="which rank of the trainer this is; rank 0 starts the others"
    )
    arguments = parser.parse_args()
    exit_with_parent()
    sock = call_back(arguments.connect)
    rank = f" rank {arguments.rank}:" if arguments.rank else ""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s{rank} %(message)s")
    transformers_logging.disable_progress_bar()
    torch.set_num_interop_threads(1)
    with sock:
        Worker(arguments.rank).serve(sock)
    return 0


class Worker:
    """Carries out commands one after the other, as one rank of a trainer. `init` loads the model."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._ranks = Ranks([])
        self._trainer: Trainer | None = None
        self._is_done = False

    def serve(self, sock: socket.socket) -> None:
        """Answer commands until `shutdown` or until the other side is gone."""
        try:
            with sock.makefile("rwb") as file:
                while not self._is_done:
                    self._answer(file)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logger.info("the other side is gone; exiting")
        finally:
            if self._trainer is not None:
                self._trainer.close()
            self._ranks.close()

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
        with self._ranks.taking_part(request):
            return self._carry_out(request)

    def _carry_out(self, request: Frame) -> JsonObject:
        arguments = request.header
        match arguments["command"]:
            case "init":
                return self._init(arguments)
            case "train_step":
                return self._train_step(arguments, request.arrays)
            case "publish":
                published = self._ready().publish()
                return asdict(published) if published else {}
            case "save":
                saved = self._ready().save(
                    Path(arguments["directory"]),
                    step=arguments["step"],
                    incarnation=arguments["incarnation"],
                    run_state=arguments["run_state"],
                )
                return {"path": str(saved.path)} if saved else {}
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
            group = Group.join(self._rank, config.num_ranks, Path(arguments["rendezvous"]), device)
        self._trainer = Trainer(setup, device=device, group=group)
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


if __name__ == "__main__":
    run_command(main)
