"""Rows 10 to 13: hostile files that the host must handle."""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable

from sandboxes.conformance.row import Row, in_box, told
from sandboxes.sandbox import Sandbox

DEEP = "import os\nfor _ in range(1000):\n    os.mkdir('d' * 50)\n    os.chdir('d' * 50)\nopen('leaf', 'w').close()"
TRAPS = """
import os, socket
os.symlink('/etc/passwd', 'link'); os.symlink('/', 'root'); os.mkfifo('fifo'); os.mkdir('folder')
socket.socket(socket.AF_UNIX).bind('socket')
"""
LINKS = """
import os
os.mkdir('aim')
open('aim/target', 'w').write('old')
os.symlink('/', 'root'); os.symlink('aim', 'folder'); os.symlink('aim/target', 'file')
"""


async def strange_names(box: Sandbox) -> str:
    for name in ("new\nline", os.fsdecode(b"not-utf8-\xff"), "a" * 200):
        data = bytes(range(256))
        await box.write(name, data)
        if await box.read(name) != data:
            return f"{name!r} does not round-trip"
    result = await box.exec_python(DEEP)
    return "" if result.is_ok else told(result)


async def traps_for_readers(box: Sandbox) -> str:
    await box.exec_python(TRAPS)
    for path in ("link", "root/usr/bin/env", "fifo", "folder", "socket", "/etc/passwd", "../x"):
        with contextlib.suppress(OSError):
            return f"reading {path!r} gives {(await box.read(path))[:50]!r}"
    return ""


def _tar(add: Callable[[tarfile.TarFile], None], kind: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        add(tar)
    return buffer.getvalue()


def _sized(member: tarfile.TarInfo, size: int) -> tarfile.TarInfo:
    member.size = size
    return member


def _with_headers(member: tarfile.TarInfo, headers: dict[str, str]) -> tarfile.TarInfo:
    member.pax_headers = headers
    return member


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **pax: str) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.pax_headers = kind, target, pax
    return _tar(lambda tar: tar.addfile(member), tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


HOSTILE_TARS = {
    "a path above": _member("../above"),
    "a path above, inside": _member("a/../../above"),
    "an absolute path": _member("/tmp/absolute"),
    "a path above, by an extended header": _member("plain", path="../above"),
    "a symbolic link": _member("link", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": _member("link", tarfile.LNKTYPE, "/etc/passwd"),
    "a device": _member("device", tarfile.CHRTYPE),
    "a FIFO": _member("fifo", tarfile.FIFOTYPE),
    "a sparse file": _member("sparse", tarfile.GNUTYPE_SPARSE),
    "no tar": b"\x1f\x8b" + bytes(600),
}
HOSTILE_TARS["a file that is not all there"] = _tar(
    lambda tar: tar.addfile(_sized(tarfile.TarInfo("short"), 4096), io.BytesIO(bytes(4096)))
)[:2000]
HOSTILE_TARS["ten sparse gigabytes"] = _tar(
    lambda tar: tar.addfile(
        _sized(
            _with_headers(
                tarfile.TarInfo("GNUSparseFile.0/x"),
                {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(10**10)},
            ),
            512,
        ),
        io.BytesIO(b"0\n".ljust(512, b"\0")),
    )
)


async def hostile_tars(box: Sandbox) -> str:
    for name, tar in HOSTILE_TARS.items():
        with contextlib.suppress(ValueError):
            await box.upload(tar)
            return f"a tar with {name} is taken"
    await box.upload(_member("folder/honest"))
    await box.exec_python(TRAPS)
    with tarfile.open(fileobj=io.BytesIO(await box.download())) as tar:
        found = {member.name for member in tar if not (member.isreg() or member.isdir())} | {
            name for name in tar.getnames() if "passwd" in name or name.startswith(("root/", "/"))
        }
        return f"downloaded: {found}" if found or "folder/honest" not in tar.getnames() else ""


async def links_for_writers(box: Sandbox) -> str:
    """Put links where the host is about to write: the write must fail or replace the link, never follow it."""
    await box.exec_python(LINKS)
    for path in ("root/planted", "folder/planted"):
        with contextlib.suppress(OSError):
            await box.write(path, b"new")
            return f"writing {path!r} succeeds"
    with contextlib.suppress(OSError):
        await box.upload(_member("planted"), "folder")
        return "an upload through a link succeeds"
    with contextlib.suppress(OSError):
        await box.write("file", b"new")
    result = await box.exec_python("import os; print(os.listdir('aim'), open('aim/target').read())")
    return "" if b"planted" not in result.stdout and b"old" in result.stdout else told(result)


ROWS = (
    Row(number=10, harm="strange names, deep folders", required="bytes round-trip", run=in_box(strange_names)),
    Row(number=11, harm="link, FIFO, socket in place of a file", required="an error", run=in_box(traps_for_readers)),
    Row(number=12, harm="hostile tar", required="rejected", run=in_box(hostile_tars)),
    Row(number=13, harm="link where the host writes", required="not followed", run=in_box(links_for_writers)),
)
