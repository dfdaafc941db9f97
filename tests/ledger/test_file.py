"""The ledger's file and its lock.

1. only its owner can read it and the files beside it; 2. a second live writer is refused, with the folder's name,
also in another process. 3. A missing file, 4. an empty one, 5. another program's database, which is left alone, and 6.
a file that is no database are refused with a remedy. That `create` keeps existing data: test_crash.py; that a closed
ledger is one file: test_shards.py.
"""

import asyncio
import os
import sqlite3
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest

from areal_agent.errors import LedgerError
from areal_agent.ledger.ledger import Ledger


async def test_it_is_private_to_its_owner(ledger: Ledger, path: Path, make) -> None:
    await make.closed(ledger.own, "s")
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(path.parent)}
    assert modes.keys() == {path.name + end for end in ("", "-wal", "-shm", ".lock")}
    assert set(modes.values()) == {0o600}


async def test_a_second_writer_is_refused(ledger: Ledger, path: Path) -> None:
    with pytest.raises(LedgerError, match=f"another process is writing to the run folder {path.parent}"):
        await Ledger.open(path, create=False)


async def test_a_second_writer_of_another_process_is_refused(ledger: Ledger, path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from areal_agent.ledger.ledger import Ledger\n"
        "asyncio.run(Ledger.open(sys.argv[1], create=False))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(path), stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert b"LedgerError: another process is writing" in stderr


def write(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("content", "create", "message"),
    [
        (None, False, "there is no ledger"),
        (b"", False, "its run ended before its tables were made"),
        (b"not a database " * 100, True, "cannot be opened: file is not a database"),
    ],
)
async def test_what_is_no_ledger_is_refused(path: Path, content: bytes | None, create: bool, message: str) -> None:
    write(path, content)
    with pytest.raises(LedgerError, match=message):
        await Ledger.open(path, create=create)


async def test_an_empty_file_can_be_made_a_ledger_but_none_without_a_folder(path: Path) -> None:
    write(path, b"")
    await (await Ledger.open(path, create=True)).aclose()
    with pytest.raises(LedgerError, match="check that its folder exists"):
        await Ledger.open(path.parent / "missing" / path.name, create=True)


async def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (cake TEXT)")
        with pytest.raises(LedgerError, match="is not a ledger of areal_agent"):
            await Ledger.open(path, create=True)
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
