"""Pages of docs/ agree with the code: configuration.md lists what the sections say; reliability.md names tests that
exist, and says which of them `pytest` leaves out by default (slow).
"""

import ast
import re
from pathlib import Path

import pytest

from areal_agent.config_reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "python -m areal_agent.config_reference > docs/configuration.md"


ROOT = Path(__file__).parent.parent
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`( \(slow\))?", (ROOT / "docs" / "reliability.md").read_text())
SLOW = "pytest.mark.slow"


def test_every_row_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| fault |")]
    assert len(faults) == len(NAMED) > 0


@pytest.mark.parametrize(("path", "name", "mark"), NAMED)
def test_it_exists_and_is_slow_where_it_says_so(path: str, name: str, mark: str) -> None:
    statements = ast.parse((ROOT / path).read_text()).body
    tests = [one for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name]
    assert len(tests) == 1, f"{path} has no {name}"
    marks = [ast.unparse(decorator) for decorator in tests[0].decorator_list]
    of_all = [ast.unparse(one) for one in statements if isinstance(one, ast.Assign)]
    is_slow = SLOW in marks or any(one.startswith("pytestmark") and SLOW in one for one in of_all)
    assert is_slow == bool(mark)
