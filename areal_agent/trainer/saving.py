"""A save on all ranks: at once, or in a thread of each rank while training goes on (`trainer.async_save`).

    rank 0    copy its shards ─┬─▶ train on
                               └─ thread:  export ─ adapter ─ training ─ manifest, rename ─▶ `ended`
                                             │         │          │      │ told what comes
    others    copy their shards ─┬─▶ train on▼         ▼          ▼      ▼
                                 └─ thread:  take part in each, until it is over

With `auto` each save decides by the memory that is free. Rank 0 writes the export, which it gathers tensor by tensor,
and each rank its shards of the rest. The same code writes live tensors and copies. Copies are gathered in process
groups of their own, so that a train step may run beside it. A disk that fails does not break the ranks: rank 0 tells
the others that it is over, and the next save may be tried.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from areal_agent.process import machine_memory
from areal_agent.trainer.checkpoint import Checkpoint
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.ranks import Group
from areal_agent.trainer.state import Content, Training, export_adapter, write_export, write_training

logger = logging.getLogger(__name__)

Publish = Callable[..., Checkpoint]
"""`publish_checkpoint` without its argument `write`."""


class Saver:
    """The saves of one rank, one after the other; every rank makes the same calls. End it with `close`.

    `source` is the folder with the tokenizer.
    """

    def __init__(
        self, training: Training, group: Group, config: TrainerConfig, *, source: Path, chat_template: str | None
    ) -> None:
        self._training = training
        self._config = config
        self._is_gpu = training.policy.device.type == "cuda"
        may_be_beside = config.saves_beside(0, 0, is_gpu=self._is_gpu)
        self._source = source
        self._chat_template = chat_template
        self._group = group
        self._aside = group.aside() if may_be_beside else group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save") if may_be_beside else None
        self._writing: Future[Checkpoint | None] | None = None

    def save(self, hidden: Path, publish: Publish) -> Checkpoint | None:
        """Publish a checkpoint, which is written to the folder `hidden` at first; ranks other than 0 get None.

        A save in a thread begins once the one before has ended. All ranks get None then, and `ended` has the result.
        Raises OSError on rank 0 if files cannot be written.
        """
        if self._writing is not None:
            wait([self._writing])
        content = Content.of(self._training)
        if self._thread is None or not self._has_room(content):
            return self._write(self._group, content, hidden, publish)
        copies = content.copied(self._aside.copied)
        self._writing = self._thread.submit(self._write, self._aside, copies, hidden, publish)
        return None

    def _has_room(self, content: Content) -> bool:
        """Return whether the copies may be made, as if all ranks were on this machine. Rank 0 decides for all."""
        copies, free = self._group.size * content.num_bytes, machine_memory()[1]
        has_room = self._group.told(self._config.saves_beside(copies, free, is_gpu=self._is_gpu))
        if not has_room:
            logger.info("training waits for this save: its copies would take %d of %s free bytes", copies, free)
        return has_room

    def ended(self) -> Checkpoint | None:
        """Return what the save in a thread has published, None while it is under way and on ranks other than 0.

        Raises OSError on rank 0 if files could not be written.
        """
        return self._writing.result() if self._writing is not None and self._writing.done() else None

    def close(self) -> None:
        """Wait for a save under way."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, group: Group, content: Content, hidden: Path, publish: Publish) -> Checkpoint | None:
        policy, template = self._training.policy, self._chat_template
        parts = (
            partial(write_export, policy=policy, source=self._source, chat_template=template, content=content),
            partial(export_adapter, training=self._training, base=self._source, content=content),
            partial(write_training, content=content, world=group.world),
        )
        if group.rank:
            while (number := group.told()) is not None:
                with suppress(OSError):  # rank 0 hears of it, too, and ends the save
                    parts[number](hidden)
            return None
        with ExitStack() as over:
            over.callback(group.told, None)

            def write(folder: Path) -> None:
                with over.pop_all():  # the others need not wait until it is published
                    for number, part in enumerate(parts):
                        group.told(number)
                        part(folder)

            return publish(write=write)
