"""What a sandbox starts with, and what goes in and out of it.

1. Set-up commands run once, before the sandbox is handed out, and see its files; 2. one that fails is an error that
tells what it said; 3. the environment of a spec is that of every program and session; 4. the working directory of a
jail can be named, and not the system's; 5. what a backend cannot give is refused at the door; 6. a folder goes in and
comes out, with what may be run; 7. so does a tar; 8. a folder with a link is not taken; 9. a download is bounded, and
leaves out links; 10. a sandbox tells whether it works; 11. any tar of plain entries is itself again (by property);
12. hosts of a network are read as they are written; 13. limits of a whole sandbox are not taken for one program.
"""

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import SandboxError
from sandboxes import Limits, Network, Pool, Sandbox, SandboxSpec
from sandboxes.folder import Entry, entries_of, pack
from tests.sandboxes.conftest import BACKENDS

in_every_backend = pytest.mark.parametrize("backend", BACKENDS)


async def test_set_up_runs_once_with_the_files(pool: Pool) -> None:
    spec = SandboxSpec(
        files={"in.txt": b"3 1 2"}, setup=["tr ' ' '\\n' < in.txt | sort > out.txt", "echo 4 >> out.txt"]
    )
    async with pool.acquire(spec) as box:
        assert await box.read("out.txt") == b"1\n2\n3\n4\n"


async def test_failed_set_up_is_an_error(pool: Pool) -> None:
    with pytest.raises(SandboxError, match=r"setup command 'echo no data >&2; exit 3' ended as nonzero: no data"):
        async with pool.acquire(SandboxSpec(setup=["echo no data >&2; exit 3"])):
            pass


async def test_environment_is_every_programs(pool: Pool) -> None:
    async with pool.acquire(SandboxSpec(env={"WHO": "me"})) as box, box.python() as python:
        for result in (
            await box.exec(["printenv", "WHO"]),
            await box.exec_python("import os; print(os.environ['WHO'])"),
            await box.shell().run("echo $WHO"),
            await python.run("import os; print(os.environ['WHO'])"),
        ):
            assert result.stdout == b"me\n"


async def test_working_directory_of_a_jail(jails: Pool) -> None:
    async with jails.acquire(SandboxSpec(workdir="/srv/app", files={"here": b""})) as box:
        assert (await box.exec(["sh", "-c", "pwd; ls; echo $HOME"])).stdout == b"/srv/app\nhere\n/srv/app\n"
    for workdir in ("/", "/usr/x", "app", "/a/../b", "/tmp/x", "/a//b"):
        with pytest.raises(SandboxError, match="give an absolute path that is not the system's"):
            async with jails.acquire(SandboxSpec(workdir=workdir)):
                pass


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"image": "debian"}, "image"),
        ({"user": "root"}, "user"),
        ({"workdir": "/app"}, "workdir"),
        ({"runtime": "runsc"}, "runtime"),
        ({"network": Network.none()}, "network"),
        ({"network": Network.allow(["pypi.org"])}, "network"),
    ],
)
async def test_what_a_backend_cannot_give_is_refused(pool: Pool, asked: dict[str, object], name: str) -> None:
    with pytest.raises(SandboxError, match=rf"SandboxSpec\.{name} is .* the subprocess backend cannot give it"):
        async with pool.acquire(SandboxSpec(**asked)):
            pass


@in_every_backend
async def test_folder_goes_in_and_out(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hello").write_text("#!/bin/sh\necho hello")
    (tmp_path / "bin" / "hello").chmod(0o755)
    (tmp_path / "empty").mkdir()
    await box.upload(tmp_path, "in/there")
    assert (await box.exec(["./hello"], cwd="in/there/bin")).stdout == b"hello\n"
    entries = entries_of(await box.download("in"))
    assert [(entry.path, entry.is_executable) for entry in entries] == [
        ("there", False),
        ("there/bin", False),
        ("there/bin/hello", True),
        ("there/empty", False),
    ]


@in_every_backend
async def test_tar_goes_in(box: Sandbox) -> None:
    await box.write("a/old", b"1")
    await box.upload(pack([Entry(path="a/new", data=b"2"), Entry(path="a/old", data=b"3")]))
    assert [await box.read(path) for path in ("a/new", "a/old")] == [b"2", b"3"]


async def test_folder_with_a_link_is_not_taken(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="link' is neither a file nor a folder; leave it out"):
        await box.upload(tmp_path)


@in_every_backend
async def test_download_is_bounded(box: Sandbox) -> None:
    make = "mkdir d; head -c 5000 /dev/zero > d/zeros; ln -s /etc/passwd d/link; mkfifo d/fifo"
    await box.exec(["sh", "-c", make])
    with tarfile.open(fileobj=io.BytesIO(await box.download("d"))) as tar:
        assert tar.getnames() == ["zeros"]
    with pytest.raises(OSError, match=r"more than max_bytes, 5000|too large"):
        await box.download("d", max_bytes=5000)
    with pytest.raises(OSError, match=r"symbolic|Not a directory"):
        await box.download("d/link")


@pytest.mark.parametrize("name", ["disk_bytes", "inodes"])
async def test_limits_of_a_sandbox_are_not_taken_for_one_program(jails: Pool, name: str) -> None:
    async with jails.acquire() as box:
        with pytest.raises(ValueError, match=rf"Limits\.{name} holds for a whole sandbox"):
            await box.exec_python("", limits=Limits(**{name: 1_000_000}))


async def test_sandbox_tells_whether_it_works(pool: Pool) -> None:
    async with pool.acquire() as box:
        assert await box.health()
    assert not await box.health()


names = st.lists(
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1), min_size=1
)
entries = st.builds(Entry, path=names.map("/".join), data=st.binary(max_size=2000), is_executable=st.booleans()).filter(
    lambda entry: not {".", ".."} & set(entry.path.split("/"))
)


@given(st.lists(entries, max_size=5))
def test_tar_of_plain_entries_is_itself_again(entries: list[Entry]) -> None:
    assert entries_of(pack(entries)) == entries


@pytest.mark.parametrize(
    ("host", "reached", "not_reached"),
    [
        ("PyPI.org", ("pypi.org.", 443), ("pypi.org", 22)),
        ("pypi.org:8080", ("pypi.org", 8080), ("pypi.org", 443)),
        ("::1", ("[::1]", 80), ("::2", 80)),
        ("[0:0::1]:99", ("::1", 99), ("::1", 80)),
        ("10.0.0.7:1", ("10.0.0.7", 1), ("10.0.0.70", 1)),
    ],
)
def test_hosts_are_read_as_written(host: str, reached: tuple[str, int], not_reached: tuple[str, int]) -> None:
    network = Network.allow([host])
    assert (network.lets(*reached), network.lets(*not_reached)) == (True, False)


@pytest.mark.parametrize("host", ["", "*", "a b", "http://pypi.org", "pypi.org:0", "pypi.org:x", ":80", "a@b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="network host"):
        Network.allow([host])


def test_set_up_is_a_list() -> None:
    with pytest.raises(ValueError, match="give a list of commands"):
        SandboxSpec(setup="make", limits=Limits())
