"""`python -m areal_agent.episode` plays a recorded session again."""

from pathlib import Path

import pytest

from areal_agent.episode.__main__ import main


def test_as_recorded(run: Path, capsys) -> None:
    assert main([str(run), "lost"]) == 0
    assert capsys.readouterr().out == "3 turns as recorded\ncompleted, reward 3\n"


def test_x(run: Path, capsys) -> None:
    code = main([str(run), "lost", "--workflow", "tests.episode.guessing:polite"])
    print(capsys.readouterr().out)
    code = main([str(run), "cut"])
    print(capsys.readouterr().out)
    main([str(run), "--regrade", "--workflow", "tests.episode.guessing:judge", "--write", str(run.parent / "copy")])
    print(capsys.readouterr().out)
    from areal_agent.ledger.__main__ import main as m
    m(["verify", str(run.parent / "copy")])
    print(capsys.readouterr().out)
    (run.parent / "hint").write_text("It is big.")
    code = main([str(run), "lost"])
    print(capsys.readouterr().out)
    code = main([str(run), "lost", "--tools", "record"])
    print(capsys.readouterr().out)
    assert 0
