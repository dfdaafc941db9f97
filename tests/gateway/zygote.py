"""A process that has imported everything and forks a gateway per command, so that gateways start quickly for killing.

It reads lines: `live KIND PATH` forks a gateway that writes to the ledger, or to the shard of one, at PATH, and prints
its address once it serves; `kill` sends it SIGKILL and prints `dead` once it is gone. It ends, with its child, at the
end of its input. Started by test_kill_storm.py.
"""

import asyncio
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.shard import LedgerShard
from areal_agent.models.recipe import train_tokenizer
from areal_agent.protocols import Journal
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import GenerateRequest

ADMIN_KEY = "sk-storm"
MODEL = "model"


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def load_renderer() -> Renderer:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer((f"{number} and {number * 7}\n" for number in range(300)), vocab_size=300)
        tokenizer.save_pretrained(folder)
        return Renderer.load(Path(folder))


async def open_journal(kind: str, path: Path) -> Journal:
    if kind == "shard":
        return await LedgerShard.open(path, create=True)
    ledger = await Ledger.open(path, create=True)
    await ledger.begin_incarnation(0)
    return ledger.own


async def serve(kind: str, path: Path, renderer: Renderer) -> None:
    def answer(request: GenerateRequest) -> list[int]:
        """Depends on the whole prompt, so that no two turns of a conversation are alike."""
        return renderer.ids_of(f"{sum(request.input_ids) * 7919 % 1_000_003} and {len(request.input_ids)}<|im_end|>")

    gateway = Gateway(
        sampler=FakeEngine(answer),
        renderer=renderer,
        journal=await open_journal(kind, path),
        model_name=MODEL,
        admin_key=ADMIN_KEY,
        max_context_tokens=10_000,
        vocab_size=renderer.vocab_size,
    )
    served = await gateway.serve()
    tell(served.base_url)
    await asyncio.Event().wait()


def fork(kind: str, path: Path, renderer: Renderer) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        asyncio.run(serve(kind, path, renderer))
    except BaseException:
        traceback.print_exc()
    finally:
        tell("failed")
        os._exit(1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    renderer = load_renderer()
    child: int | None = None
    for line in sys.stdin:
        match line.split():
            case ["live", kind, path]:
                child = fork(kind, Path(path), renderer)
            case ["kill"] if child is not None:
                kill(child)
                child = None
                tell("dead")
            case command:
                raise SystemExit(f"unknown command {command}")
    if child is not None:
        kill(child)


if __name__ == "__main__":
    main()
