"""How embedded engines are started: each knows how many others share its memory, on the machine or on a GPU."""

from pathlib import Path
from typing import Any

import pytest

from areal_agent.cluster.servers import command_of
from areal_agent.engine.config import EngineConfig
from areal_agent.types import WeightVersion


@pytest.mark.parametrize(
    ("settings", "sharing"),
    [
        ({}, "1"),
        ({"num_servers": 3}, "3"),
        ({"num_servers": 3, "device": "cpu"}, "3"),
        ({"num_servers": 3, "device": "cuda"}, "1"),  # each has a GPU of its own
    ],
)
def test_who_shares_its_memory(settings: dict[str, Any], sharing: str) -> None:
    command = list(command_of(EngineConfig(**settings), Path("model"), WeightVersion()))
    assert command[command.index("--sharing") + 1] == sharing
