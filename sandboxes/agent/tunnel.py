"""The inner end of a tunnel out of a sandbox: carries connections to one port of its loopback over stdin and stdout.

It runs as a program, where there are users with one of its own, whom the other programs can neither signal nor trace.
Its source is sent alone, so it imports nothing of ours. It opens no connections. The host first sends the port in two
bytes, 0 for any that is free; the first frame has the port that listens, in place of a connection's number.
"""

import os
import select
import socket
import struct

FRAME = struct.Struct("=BQI")  # as `wire.HEADER`
"""Kind, number of the connection, length of the data that follows; that of TAKEN is the number of bytes taken."""
AHEAD_BYTES = 256 * 1024
"""The most that either end sends of one connection before the other has delivered any of it. So no connection waits for
another."""
OPEN, DATA, END, TAKEN, GONE = 1, 2, 3, 4, 5
CHUNK_BYTES = 32_768
MAX_CONNECTIONS = 64


class Connection:
    """One connection of a program."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self.number = number
        self.channel = channel
        self.pending = bytearray()  # on its way to the program
        self.num_ahead = 0  # bytes on their way from it
        self.is_ending = False  # the host sends no more
        self.has_ended = False  # the program sends no more


class Tunnel:
    """The tunnel; `source` and `out` are descriptors of the stream to the host."""

    def __init__(self, listener: socket.socket, source: int, out: int) -> None:
        self._listener = listener
        self._source = source
        self._out = out
        self._connections: dict[int, Connection] = {}
        self._num_opened = 0
        self._received = bytearray()

    def serve(self) -> None:
        """Serve until the host is gone."""
        while True:
            everyone = list(self._connections.values())
            open_ones = (one for one in everyone if not one.has_ended)  # also to hear of their end
            heard = (one.channel for one in open_ones if one.num_ahead < AHEAD_BYTES or one.is_ending)
            readers = [self._source, *heard]
            if len(everyone) < MAX_CONNECTIONS:
                readers.append(self._listener)
            writers = [one.channel for one in everyone if one.pending]
            readable, writable, _ = select.select(readers, writers, [])
            if self._source in readable and not self._hear():
                return
            if self._listener in readable:
                self._accept()
            for one in everyone:
                if one.channel in readable and one.channel.fileno() >= 0:
                    self._carry(one)
                if one.channel in writable and one.channel.fileno() >= 0:
                    self._deliver(one)

    def _accept(self) -> None:
        channel, _ = self._listener.accept()
        channel.setblocking(False)
        self._num_opened += 1
        self._connections[self._num_opened] = Connection(self._num_opened, channel)
        self._tell(OPEN, self._num_opened)

    def _hear(self) -> bool:
        data = os.read(self._source, 65_536)
        self._received += data
        while len(self._received) >= FRAME.size:
            kind, number, size = FRAME.unpack_from(self._received)
            if len(self._received) < FRAME.size + size:
                break
            body = bytes(self._received[FRAME.size : FRAME.size + size])
            del self._received[: FRAME.size + size]
            one = self._connections.get(number)
            if one is not None and kind == TAKEN:
                one.num_ahead -= int(body)
            elif one is not None:
                one.pending += body
                one.is_ending = one.is_ending or kind == END
                self._deliver(one)
        return bool(data)

    def _carry(self, one: Connection) -> None:
        """Carry data from the program to the host."""
        try:
            data = one.channel.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(one)
            return
        one.num_ahead += len(data)
        self._tell(DATA if data else END, one.number, data)
        if not data:
            one.has_ended = True
            self._drop_when_done(one)

    def _deliver(self, one: Connection) -> None:
        """Deliver data from the host to the program."""
        try:
            while one.pending:
                sent = one.channel.send(one.pending[:CHUNK_BYTES])
                del one.pending[:sent]
                self._tell(TAKEN, one.number, b"%d" % sent)
            if one.is_ending:
                one.channel.shutdown(socket.SHUT_WR)
                self._drop_when_done(one)
        except BlockingIOError:
            return
        except OSError:
            self._drop(one)

    def _drop_when_done(self, one: Connection) -> None:
        if one.has_ended and one.is_ending and not one.pending:
            self._drop(one)

    def _drop(self, one: Connection) -> None:
        one.channel.close()
        if self._connections.pop(one.number, None) is not None:
            self._tell(GONE, one.number)

    def _tell(self, kind: int, number: int, body: bytes = b"") -> None:
        view = memoryview(FRAME.pack(kind, number, len(body)) + body)
        while view:
            view = view[os.write(self._out, view) :]


def main() -> None:
    with socket.create_server(("127.0.0.1", int.from_bytes(os.read(0, 2), "big"))) as listener:
        os.write(1, FRAME.pack(OPEN, listener.getsockname()[1], 0))
        Tunnel(listener, 0, 1).serve()


if __name__ == "__main__":
    main()
