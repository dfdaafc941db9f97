"""curve.png.

1. it is a PNG of the stated size; 2. it is drawn for one step, for gaps, for rewards beyond 0 to 1, without levels;
3. the levels and the points are in the picture: without them it differs; 4. the running mean, by hand, leaves gaps
out.
"""

import struct
from pathlib import Path

import numpy as np
import pytest

from areal_agent.observe.curve import draw_curve, running_mean


def row(step: int, reward: float | None) -> dict:
    return {
        "step": step,
        "reward/mean": reward,
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "tokens_per_s/generated": 1500.0 + step,
        "tokens_per_s/trained": 1200.0,
    }


ROWS = [row(step, step / 20) for step in range(1, 20)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return drawn(tmp_path_factory.mktemp("plain"), ROWS)


def drawn(folder: Path, rows: list[dict], **levels: float) -> bytes:
    draw_curve(rows, folder / "curve.png", **levels)
    return (folder / "curve.png").read_bytes()


def test_it_is_a_png_of_the_stated_size(plain: bytes) -> None:
    assert plain[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", plain[16:24]) == (1200, 1020)


@pytest.mark.parametrize(
    "rows",
    [ROWS[:1], [row(1, -2.0), row(2, None), {"step": 3}, row(4, 7.5)], [{"step": 1}]],
    ids=["one step", "gaps, and rewards beyond 0 to 1", "nothing but steps"],
)
def test_it_is_drawn_whatever_the_rows(tmp_path: Path, rows: list[dict]) -> None:
    assert len(drawn(tmp_path, rows)) > 10_000


@pytest.mark.parametrize(
    ("rows", "levels"),
    [(ROWS, {"success_before": 0.3}), (ROWS, {"success_after": 0.95}), ([*ROWS[:-1], row(19, 0.1)], {})],
    ids=["success before", "success after", "another reward"],
)
def test_what_is_told_is_in_the_picture(plain: bytes, tmp_path: Path, rows: list[dict], levels: dict) -> None:
    assert drawn(tmp_path, rows, **levels) != plain


def test_the_running_mean_leaves_gaps_out() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0])
    np.testing.assert_allclose(running_mean(values, 2), [1.0, 2.0, 3.0, 5.0])
