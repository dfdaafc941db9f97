"""`python -m sandboxes`: 1. a wrong command or option is answered with the nearest one, also before something that is
missing; 2. `doctor --json` says what the table says."""

import json

import pytest

from sandboxes.__main__ import main
from sandboxes.doctor import Finding


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["docter"], "unknown command 'docter'; did you mean 'doctor'?"),
        (["check", "--bakend", "docker"], "unknown option '--bakend'; did you mean '--backend'?"),
        (["--bakend", "check"], "unknown option '--bakend'; valid: --help, -h"),
        (["xyz"], "unknown command 'xyz'; valid: check, doctor, image, reap"),
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


def test_what_it_finds_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sandboxes", "doctor", "--json"])
    assert main() == 0
    findings = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert {"containers", "walls by bubblewrap", "walls by namespaces", "Bash"} <= {one.subject for one in findings}
    assert all(isinstance(one.works, bool) and one.detail for one in findings)
