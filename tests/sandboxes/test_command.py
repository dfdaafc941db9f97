"""`python -m sandboxes`: 1. a wrong command or option is an error in one line, and a hint; 2. `doctor` names what
`auto` takes, and says the same as JSON; 3. `check` prints a line a row, and exits with 0.
"""

import json
from collections.abc import Callable

import pytest

from sandboxes.__main__ import Finding, main
from sandboxes.conformance import ROWS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["docter"], "invalid choice: 'docter' (choose from 'doctor'"),
        (["check", "--backend", "jail", "--quick"], "unrecognized arguments: --quick"),
        (["check"], "--backend"),
        (["check", "--backend", "dokcer"], "'docker'"),
    ],
)
def test_a_wrong_word(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sandboxes", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert (ended.value.code, len(lines)) == (2, 2)
    assert message in lines[0] and lines[1].endswith("--help")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["sandboxes", *words])
        assert main() == 0
        return capsys.readouterr().out

    return said


def test_doctor(said: Callable[..., str]) -> None:
    findings = [Finding(**one) for one in json.loads(said("doctor", "--json"))]
    assert {"containers", "jails", "Bash"} <= {one.subject for one in findings}
    assert all(isinstance(one.works, bool) and one.detail for one in findings)
    works = {one.subject.split()[0] for one in findings if one.works}
    strongest = "docker" if "containers" in works else "jail" if "jails" in works else "subprocess"
    assert said("doctor").splitlines()[-1].split()[-1] == strongest


@pytest.mark.slow
def test_check_prints_a_line_a_row(said: Callable[..., str]) -> None:
    lines = said("check", "--backend", "subprocess").splitlines()
    assert lines[0] == "isolation: process"
    assert [int(line.split()[0]) for line in lines[1 : len(ROWS) + 1]] == [row.number for row in ROWS]
    assert {line.split()[1] for line in lines[1 : len(ROWS) + 1]} == {"held", "beyond"}
