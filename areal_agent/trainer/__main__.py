"""The trainer process, `python -m areal_agent.trainer --connect HOST:PORT`: it carries out commands and answers them.

A run starts it and is called back at that address (callback.py). A failure is an answer too. The process ends with the
command `shutdown`, or when the other side closes its end. With `trainer.num_ranks` above 1 the run also starts the
other ranks (`--rank K`). They call rank 0, which forwards every command to them; those exit when a command fails.
"""

import logging

import torch
from transformers.utils import logging as transformers_logging

from areal_agent.callback import LOOPBACK, call_back
from areal_agent.command import Parser, run_command
from areal_agent.process import exit_with_parent
from areal_agent.trainer.worker import Worker


def main() -> int:
    parser = Parser(
        prog="python -m areal_agent.trainer", description="The trainer process of a run; `areal_agent.train` starts it."
    )
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where commands come from")
    parser.add_argument("--rank", type=int, default=0, help="which rank of the trainer this is; the others call rank 0")
    parser.add_argument(
        "--address", default=LOOPBACK, help="that of this machine at which ranks and servers find this one"
    )
    arguments = parser.parse_args()
    exit_with_parent()
    sock = call_back(arguments.connect)
    rank = f" rank {arguments.rank}:" if arguments.rank else ""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s{rank} %(message)s")
    transformers_logging.disable_progress_bar()
    torch.set_num_interop_threads(1)
    with sock:
        Worker(arguments.rank, arguments.address).serve(sock)
    return 0


if __name__ == "__main__":
    run_command(main)
