"""docs/configuration.md says what the sections say."""

from pathlib import Path

from areal_agent.config_reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "python -m areal_agent.config_reference > docs/configuration.md"
