"""A save on all ranks: at once, or in a thread of each rank while training goes on (`trainer.async_save`).

    rank 0    copy its shards ─┬─▶ train on
                               └─ thread:  export ─ adapter ─ training ─ manifest, rename ─▶ `ended`
                                             │         │          │      │ told what comes
    others    copy their shards ─┬─▶ train on▼         ▼          ▼      ▼
                                 └─ thread:  take part in each, until it is over

Rank 0 writes the export, which it gathers tensor by tensor, and each rank its shards of the rest. The same code writes
live tensors and copies. Copies are gathered in process groups of their own, so that a train step may run beside it. A
disk that fails does not break the ranks: rank 0 tells the others that it is over, and the next save may be tried.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from areal_agent.trainer.checkpoint import Checkpoint
from areal_agent.trainer.ranks import Group
from areal_agent.trainer.state import Content, Training, export_adapter, write_export, write_training

Publish = Callable[..., Checkpoint]
"""`publish_checkpoint` without its argument `write`."""


class Saver:
    """The saves of one rank, one after the other; every rank makes the same calls. End it with `close`.

    `source` is the folder with the tokenizer.
    """

    def __init__(
        self, training: Training, group: Group, *, source: Path, chat_template: str | None, is_beside: bool
    ) -> None:
        self._training = training
        self._source = source
        self._chat_template = chat_template
        self._group = group.aside() if is_beside else group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save") if is_beside else None
        self._writing: Future[Checkpoint | None] | None = None

    def save(self, hidden: Path, publish: Publish) -> Checkpoint | None:
        """Publish a checkpoint, which is written to the folder `hidden` at first; ranks other than 0 get None.

        A save in a thread begins once the one before has ended. All ranks get None then, and `ended` has the result.
        Raises OSError on rank 0 if files cannot be written.
        """
        if self._thread is None:
            return self._write(Content.of(self._training), hidden, publish)
        if self._writing is not None:
            wait([self._writing])
        copies = Content.of(self._training).copied(self._group.copied)
        self._writing = self._thread.submit(self._write, copies, hidden, publish)
        return None

    def ended(self) -> Checkpoint | None:
        """Return what the save in a thread has published, None while it is under way and on ranks other than 0.

        Raises OSError on rank 0 if files could not be written.
        """
        return self._writing.result() if self._writing is not None and self._writing.done() else None

    def close(self) -> None:
        """Wait for a save under way."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, content: Content, hidden: Path, publish: Publish) -> Checkpoint | None:
        policy, template = self._training.policy, self._chat_template
        parts = (
            partial(write_export, policy=policy, source=self._source, chat_template=template, content=content),
            partial(export_adapter, training=self._training, base=self._source, content=content),
            partial(write_training, content=content, world=self._group.world),
        )
        if self._group.rank:
            while (number := self._group.told()) is not None:
                with suppress(OSError):  # rank 0 hears of it, too, and ends the save
                    parts[number](hidden)
            return None
        with ExitStack() as over:
            over.callback(self._group.told, None)

            def write(folder: Path) -> None:
                with over.pop_all():  # the others need not wait until it is published
                    for number, part in enumerate(parts):
                        self._group.told(number)
                        part(folder)

            return publish(write=write)
