"""What is handed over to a verifier, and how far a verdict is trusted, without containers (rows 34 to 36 of the hostile
suite have the plays in real ones).

1. Links: those that lead out are left out, through any chain; the image's own stay, also hard links to them; 2. modules
in place of Python's own go, unless the image has them, the task names them, or nobody can import them; 3. what pytest
loads by itself goes, its sections in settings are renamed, and compiled modules go; 4. what the supervisor says becomes
reasons, suspicions and ends; 5. what becomes of a suspicious verdict is the config's.
"""

import hashlib
import io
import tarfile
import tempfile
from collections.abc import Mapping
from typing import IO

import pytest

from areal_agent.errors import Reject
from sandboxes.tasks.handover import Handover, Kind, Suspicion, TaskFiles, copy_but, look_through
from sandboxes.tasks.harbor import TaskVerdict
from sandboxes.tasks.watch import Trust, seen_in


def handed_over(
    files: Mapping[str, str | bytes], in_image: Mapping[str, str] | None = None, text: str = ""
) -> tuple[list[str], Handover, dict[str, bytes]]:
    """Hand over /app, and return what came: text is a link's target ("=..." a hard link's), bytes are a file's."""
    tar: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
    with tarfile.open(fileobj=tar, mode="w") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(f"app/{name}")
            if isinstance(content, bytes):
                member.size = len(content)
                opened.addfile(member, io.BytesIO(content))
            else:
                is_hard = content.startswith("=")
                member.type, member.linkname = (tarfile.LNKTYPE if is_hard else tarfile.SYMTYPE), content.lstrip("=")
                opened.addfile(member)
    task = TaskFiles(declared=["/app", "/logs/artifacts"], text=text, scripts="", is_python=True)
    found = Handover()
    left_out = look_through(task, {"/app": tar}).judge(task, in_image or {}, found)
    anew = io.BytesIO()
    copy_but(tar, anew, "/app", left_out, found.settings)
    with tarfile.open(fileobj=anew) as opened:
        came = {one.name: (opened.extractfile(one) or io.BytesIO()).read() if one.isreg() else b"" for one in opened}
    return [name.removeprefix("app/") for name in came], found, came


@pytest.mark.parametrize(
    ("links", "kept", "num_suspicions"),
    [
        ({"a": "/tests/x"}, [], 1),
        ({"a": "../tests"}, [], 1),
        ({"a": "/"}, [], 1),
        ({"a": "/logs"}, [], 1),
        ({"a": "/usr/bin/python3"}, [], 0),
        ({"a": "b", "b": "../app/c/../d"}, ["a", "b"], 0),
        ({"up": "d/..", "d": "..", "a": "up/tests/x"}, [], 3),
        ({"a": "a"}, [], 0),
        ({"a": "/logs/artifacts/x"}, ["a"], 0),
        ({"a": "/tests/x", "b": "=app/a"}, [], 2),
        ({"a": "/appendix"}, [], 0),
    ],
)
def test_links(links: dict[str, str], kept: list[str], num_suspicions: int) -> None:
    came, found, _ = handed_over(links)
    assert came == kept
    assert [one.kind for one in found.suspicions] == [Kind.LINK] * num_suspicions
    assert len(found.left_out) == len([name for name in links if name not in kept])


def test_the_very_link_of_the_image_stays() -> None:
    came, found, _ = handed_over({"bin": "/usr/bin", "b": "/usr/bin"}, {"/app/bin": f"link {b'/usr/bin'.hex()}"})
    assert came == ["bin"]
    assert found.left_out == ["/app/b, a link to /usr/bin"]


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ({"json.py": b""}, []),
        ({"unittest/__init__.py": b"", "unittest/x.py": b""}, ["unittest/x.py"]),
        ({"src/json.py": b""}, []),
        ({"src/__init__.py": b"", "src/json.py": b""}, ["src/__init__.py", "src/json.py"]),
        ({"__init__.py": b"", "json.py": b""}, ["__init__.py"]),
        ({"a.txt": b"", "json.py": "a.txt"}, ["a.txt"]),
        ({"a.txt": b"", "x": "a.txt", "json.py": "=app/x"}, ["a.txt", "x"]),
        ({"json.cpython-311-x86_64-linux-gnu.so": b""}, []),
        ({"html/index.html": b"", "json.txt": b"", "queue.pyx": b""}, ["html/index.html", "json.txt", "queue.pyx"]),
        ({"calendar.py": b""}, ["calendar.py"]),  # the task asks for it
        ({"random.py": b"own"}, ["random.py"]),  # the image has it
    ],
)
def test_modules_in_place_of_pythons_own(files: dict[str, str | bytes], kept: list[str]) -> None:
    in_image = {"/app/random.py": f"file {hashlib.sha256(b'own').hexdigest()}"}
    came, found, _ = handed_over(files, in_image, text="Write calendar.py, with a test for its json.")
    assert came == kept
    assert {one.kind for one in found.suspicions} == (set() if len(kept) == len(files) else {Kind.SHADOW})


def test_deep_folders_and_large_files_cost_this_process_nothing() -> None:
    deep, large = "d/" * 2000 + "a.txt", b"[tool.pytest.ini_options]" + b" " * 2**20
    came, found, _ = handed_over({deep: b"", "pyproject.toml": large, "x/conftest.py": large})
    assert came == [deep]
    assert found.left_out[0] == "what /app/pyproject.toml says to pytest"


def test_what_is_loaded_without_being_asked_for_stays_away_and_is_no_suspicion() -> None:
    settings = b"[project]\nname = 'pytest'\n[tool.pytest.ini_options]\naddopts = '--co'\n"
    came, found, contents = handed_over(
        {
            "conftest.py": b"", "t/conftest.py": b"", "pytest.ini": b"", "a.pth": b"import os", "b.pth": b"/x",
            "x.egg-info/entry_points.txt": b"[pytest11]", "__pycache__/test_f.cpython-311.pyc": b"",
            "pyproject.toml": settings, "setup.cfg": b"[metadata]",
        }
    )  # fmt: skip
    assert came == ["b.pth", "pyproject.toml", "setup.cfg"]
    assert contents["app/pyproject.toml"] == settings.replace(b"tool.pytest", b"tool.unused")
    assert found.suspicions == []


@pytest.mark.parametrize(
    ("said", "trust", "num_early"),
    [
        ("confined ./solve\n", Trust.PROVED, 0),
        ("7 started S\n7 ended S 0\n7 exited 0\n", Trust.PROVED, 0),
        ("7 started S\n7 agent /app/f.py\n7 ended S 0\n7 exited 0\n", Trust.IN_PROCESS, 0),
        ("7 started S\n7 agent /app/f.py\n7 exited 0\n", Trust.IN_PROCESS, 1),
        ("7 started S\n7 agent /app/f.py\n7 ended X 0\n7 exited 0\n", Trust.IN_PROCESS, 1),
        ("7 started S\n7 started X\n7 agent /app/f.py\n7 ended X 0\n7 exited 0\n", Trust.IN_PROCESS, 1),
        ("7 started S\n7 agent /app/f.py\n7 ended S 1\n7 exited 0\n", Trust.IN_PROCESS, 1),
        ("7 started S\n7 agent /app/f.py\n7 exited -9\n", Trust.IN_PROCESS, 0),
        ("7 started S\n7 agent /app/f.py\r7 ended S 0\n7 saw nonsense x\n7 exited 0\n", Trust.IN_PROCESS, 1),
        ("7 loads node\n", Trust.IN_PROCESS, 0),
        ("7 loads python3\n7 started S\n7 ended S 0\n7 exited 0\n", Trust.PROVED, 0),
        ("unconfined there is no Landlock\n", Trust.IN_PROCESS, 0),
        ("given ./solve /tests\n", Trust.IN_PROCESS, 0),
        ("changed /root/.curlrc\n", Trust.IN_PROCESS, 0),
    ],
)
def test_what_the_supervisor_saw(said: str, trust: Trust, num_early: int) -> None:
    seen = seen_in(f"{said}done 0\n")
    assert (seen.trust, len(seen.early_ends), seen.end) == (trust, num_early, "0")
    assert seen_in(said).end == ""


def test_a_suspicious_verdict_counts_as_the_config_says() -> None:
    link = Suspicion(Kind.LINK, "/app/a leads to /tests")
    verdict = TaskVerdict(reward=1.0, rewards={}, detail="", trust=Trust.PROVED, suspicions=[link])
    assert [verdict.reward_for("keep"), verdict.reward_for("zero")] == [1.0, 0.0]
    with pytest.raises(Reject, match="link: /app/a leads to /tests"):
        verdict.reward_for("drop")
    assert (verdict.logged["suspicious_link"], verdict.logged["suspicions"]) == (1, str(link))
    honest = TaskVerdict(reward=1.0, rewards={}, detail="", trust=Trust.PROVED)
    assert [honest.reward_for(what) for what in ("keep", "zero", "drop")] == [1.0] * 3
