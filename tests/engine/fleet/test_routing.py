"""The choice of the server for a request:

- a prompt goes where its beginning is cached, unless that server is overloaded; otherwise to the least busy one
- the longer of two known beginnings decides; a server that is gone is not chosen; memory is bounded
"""

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.fleet.member import BLOCK_TOKENS, Router


def prompt(number: int, num_tokens: int = 3 * BLOCK_TOKENS) -> list[int]:
    return [number] * num_tokens


def test_the_next_turn_goes_where_the_one_before_went():
    router = Router()
    assert router.choose(prompt(1), {"a": 1, "b": 0, "c": 1}) == "b"
    assert router.choose([*prompt(1), 7, 8], {"a": 0, "b": 3, "c": 0}) == "b"
    assert router.choose(prompt(2), {"a": 0, "b": 3, "c": 1}) == "a"


def test_a_server_with_too_much_to_do_is_left_and_its_prompt_moves():
    router = Router(max_lead=2)
    assert router.choose(prompt(1), {"a": 0, "b": 1}) == "a"
    assert router.choose(prompt(1), {"a": 3, "b": 0}) == "b"
    assert router.choose(prompt(1), {"a": 0, "b": 2}) == "b"


def test_the_deepest_beginning_decides():
    router = Router()
    router.choose(prompt(1), {"a": 0, "b": 1})
    router.choose([*prompt(1), *prompt(2)], {"a": 9, "b": 0})
    assert router.choose([*prompt(1), *prompt(2), 5], {"a": 0, "b": 0}) == "b"


def test_who_is_gone_is_chosen_no_more():
    router = Router()
    assert router.choose(prompt(1), {"a": 0, "b": 1}) == "a"
    assert router.choose(prompt(1), {"b": 1}) == "b"


@given(st.lists(st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS), max_size=20), st.integers(1, 8))
def test_it_remembers_a_bounded_number_of_blocks_and_always_chooses_a_server(prompts, num_servers):
    router = Router(max_keys=5)
    loads = {f"server {number}": 0 for number in range(num_servers)}
    for one in prompts:
        loads[router.choose(one, loads)] += 1
    assert sum(loads.values()) == len(prompts) and len(router._home_of) <= 5
