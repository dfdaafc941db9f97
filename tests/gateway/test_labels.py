"""Which version labels are a trainer's own.

1. A label of one of its incarnations counts by its step, even if a crash undid the step. 2. Any other is older than
every bound. 3. If the trainer names no incarnation, all labels are its own. 4. An incarnation is stored once.
"""

from areal_agent.gateway.online.groups import FOREIGN, Labels
from areal_agent.staleness import is_stale
from areal_agent.types import WeightVersion

OWN = Labels(incarnations=(0, 3))


def test_its_own_count_by_their_step() -> None:
    assert [OWN.step_of(WeightVersion.parse(text)) for text in ("0:9", "3:5")] == [9, 5]


def test_any_other_is_older_than_every_bound() -> None:
    assert OWN.step_of(WeightVersion.parse("1:9")) == FOREIGN
    assert is_stale(FOREIGN, step=1, max_staleness=2**29)


def test_without_a_name_all_are_its_own() -> None:
    assert Labels().step_of(WeightVersion.parse("7:3")) == 3


def test_an_incarnation_is_named_once() -> None:
    assert Labels().naming(2).naming(4).naming(2) == Labels(incarnations=(2, 4))
