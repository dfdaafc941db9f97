"""Sends weights to engines by torch.distributed: to each that asks, in a process group of the two (transfer_group.py).

    write ─▶ a copy in the trainer's memory, offered ─ DistributedWeights ─▶ engines ask, now or later
             a thread waits for requests ─▶ a thread for each: the copy, bucket after bucket, while training goes on

One that dies or hangs costs its own transfer alone, and who comes late, or is started again, asks as the others did.
What was written last is offered; a transfer under way of what was written before ends well.
It knows nothing of engines and versions.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from areal_agent.engine.embedded.transfer_group import (
    Request,
    Store,
    ask,
    connect,
    next_request,
    open_store,
    refuse,
    send,
)
from areal_agent.engine.embedded.weight_bytes import checksum
from areal_agent.engine_types import DistributedWeights, TensorEntry
from areal_agent.weights.flat import flat_copy
from areal_agent.weights.shared_memory import check_parameters

TIMEOUT_S = 60.0
"""How long either side of a transfer waits for the next step of the other."""
CLOSING_S = 5.0
"""How long transfers under way may take to end."""
JOIN_S = 0.05

logger = logging.getLogger(__name__)


class DistributedChannel:
    """The sending side. Between two writes it holds one set of weights."""

    def __init__(
        self,
        entries: tuple[TensorEntry, ...],
        device: torch.device,
        *,
        host: str,
        bucket_bytes: int,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Offer what `entries` tell (`shared_memory.layout`) at `host`, an address of this machine."""
        self._entries = entries
        self._device = device
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        store = open_store(host, timeout_s)
        self._store: Store | None = store
        self._port = store.port
        self._sending: list[threading.Thread] = []
        self._held: tuple[str, Tensor] | None = None
        self._listening = threading.Thread(target=self._listen, name="requests for weights", daemon=True)
        self._listening.start()

    def write(self, parameters: Mapping[str, Tensor]) -> DistributedWeights:
        """Copy the parameters, and offer them from now on. Raises ValueError when they are not the layout's."""
        check_parameters(self._entries, parameters)
        self._held = None  # before as much is taken again
        data = flat_copy(self._entries, parameters, self._device)
        name = secrets.token_hex(8)
        digest = checksum(data)  # which waits until all is copied
        self._held = (name, data)
        return DistributedWeights(
            host=self._host,
            port=self._port,
            name=name,
            entries=self._entries,
            num_bytes=len(data),
            bucket_bytes=self._bucket_bytes,
            checksum=digest,
            timeout_s=self._timeout_s,
        )

    def close(self) -> None:
        """Let go of what was written last. Who waits for something of the other side is told that nothing will come."""
        self._held = None
        ask(self._client(), None)
        self._listening.join()
        self._store = None  # the end of the store is the end of all that wait for it
        deadline_s = time.monotonic() + CLOSING_S
        for thread in self._sending:
            while thread.is_alive() and time.monotonic() < deadline_s:
                thread.join(JOIN_S)  # one long wait was seen to hold the thread up until its end

    def _listen(self) -> None:
        store = self._client()
        for number in itertools.count(1):
            try:
                request = next_request(store, number)
            except (TypeError, ValueError) as error:  # a stranger wrote it
                logger.warning("request %d for weights cannot be read: %s", number, error)
                continue
            if request is None:
                return
            thread = threading.Thread(target=self._send, args=(request,), name="a transfer", daemon=True)
            self._sending = [*(one for one in self._sending if one.is_alive()), thread]
            thread.start()

    def _send(self, request: Request) -> None:
        held = self._held
        try:
            store = self._client()
            if held is None or held[0] != request.what:
                refuse(store, request, "the trainer has newer weights by now, and offers these no more")
                return
            send(store, request, held[1], bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s)
        except Exception as error:  # the boundary of this thread: the other side sees the end of the group
            logger.warning("weights for %s did not get through: %s", request.group, error)

    def _client(self) -> Store:
        return connect(self._host, self._port, self._timeout_s)
