"""The way to an engine on another machine: a local socket, each connection of which leads there.

Run as `python -I -S way.py HOST SOCKET`; it prints a line once it listens. All else here speaks to a local socket, so
streams, builds and the keeper are the same for every engine. The way outlives its host, whose containers the keeper
has yet to remove, by `PATIENCE_S`. It uses only the standard library, so that it stays small.

`tcp://` is encrypted where `DOCKER_TLS_VERIFY` or `DOCKER_CERT_PATH` is set, as Docker's own client has it, and the
engine's certificate is always verified. `ssh://` runs the `ssh` program, without questions.
"""

import asyncio
import contextlib
import os
import shutil
import ssl
import sys
import urllib.parse

PATIENCE_S = 40.0
CHUNK_BYTES = 65_536
PLAIN_PORT, ENCRYPTED_PORT = 2375, 2376


def encryption() -> ssl.SSLContext | None:
    folder = os.environ.get("DOCKER_CERT_PATH")
    if not (folder or os.environ.get("DOCKER_TLS_VERIFY")):
        return None
    folder = folder or os.path.expanduser("~/.docker")
    context = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    context.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
    return context


async def dial(host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urllib.parse.urlsplit(host)
    if url.scheme != "ssh":
        context = encryption()
        return await asyncio.open_connection(
            url.hostname, url.port or (ENCRYPTED_PORT if context else PLAIN_PORT), ssl=context
        )
    port = () if url.port is None else ("-p", str(url.port))
    place = url.netloc.rpartition("@")[0] + "@" * ("@" in url.netloc) + (url.hostname or "")
    process = await asyncio.create_subprocess_exec(
        "ssh", "-o", "BatchMode=yes", *port, "--", place, "docker", "system", "dial-stdio",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    return process.stdout, process.stdin


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            return
    writer.close()


async def serve(host: str, path: str) -> None:
    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await dial(host)
        except OSError as error:
            print(f"no way to {host}: {error}", file=sys.stderr, flush=True)
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        far_writer.close()
        writer.close()

    async with await asyncio.start_unix_server(lead, path):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        await asyncio.sleep(PATIENCE_S)


def main() -> None:
    host, path = sys.argv[1:]
    try:
        asyncio.run(serve(host, path))
    finally:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


if __name__ == "__main__":
    main()
