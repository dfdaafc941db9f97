"""The channel over torch.distributed, and the embedded engine's own receiver at its other end.

- The engine takes what was written, in float32 and bfloat16, in one bucket or in many; tied weights are sent once.
- Who asks late, or with others at once, is sent the same; who asks for what was written before is refused.
- What is damaged on its way is refused; so is a record of weights that do not lie where it says. The checksum tells a
  changed byte, and blocks that changed places.
- A server that fails costs nobody else: others are sent the weights meanwhile.
- Requests that come at once are all heard, and what a stranger writes into the store ends nothing.
- Several ranks hold equally many bytes, each asked for its own; a model may be too small for all of them.
- Who asks without knowing the name of the weights is sent nothing.
- Nobody listens but at the address that was asked for.
- Parameters of another model are refused. After `close` nothing is sent, and nothing is left running.
"""

import dataclasses
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from areal_agent.engine.embedded.transfer import (
    BLOCK_BYTES,
    Request,
    ask,
    checksum,
    connect,
    next_request,
    open_store,
    take,
    tensors_over,
)
from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DistributedWeights, WeightPart
from areal_agent.weights.channels import DistributedChannel, layout
from tests.engine.transfers import Channels, damaged, lacking_a_tensor, with_last_part
from tests.weights.test_channels import Tied, parameters

HOST = "127.0.0.1"
DEADLINE_S = 60.0  # only a hang is longer


def open_channel(*, dtype: torch.dtype = torch.float32, bucket_bytes: int = 2**20) -> DistributedChannel:
    entries = layout(parameters(0).items(), dtype)
    return DistributedChannel(entries, torch.device("cpu"), host=HOST, bucket_bytes=bucket_bytes, timeout_s=DEADLINE_S)


@pytest.fixture
def channel() -> Iterator[DistributedChannel]:
    channel = open_channel()
    yield channel
    channel.close()


def as_taken(weights: DistributedWeights) -> dict[str, Tensor]:
    return dict(take_weights(weights, WeightLayout(Tied(0)), torch.device("cpu")))


def is_of(taken: dict[str, Tensor], seed: int, dtype: torch.dtype = torch.float32) -> bool:
    expected = parameters(seed)
    return taken.keys() == expected.keys() and all(torch.equal(taken[name], expected[name].to(dtype)) for name in taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [100, BLOCK_BYTES, 2**20])
def test_the_engine_takes_what_was_written(dtype, bucket_bytes):
    channel = open_channel(dtype=dtype, bucket_bytes=bucket_bytes)
    weights = channel.write(parameters(1))
    assert is_of(as_taken(weights), 1, dtype)
    assert [entry.name for entry in weights.entries].count("embedding.weight") == 1
    channel.close()


def test_many_ask_at_once_and_late(channel):
    weights = channel.write(parameters(1))
    with ThreadPoolExecutor(4) as pool:
        assert all(is_of(taken, 1) for taken in pool.map(as_taken, [weights] * 4))
    assert is_of(as_taken(weights), 1)


def test_what_was_written_before_is_offered_no_more(channel):
    first, second = (channel.write(parameters(seed)) for seed in (1, 2))
    with pytest.raises(WeightUpdateError, match="has newer weights"):
        as_taken(first)
    assert is_of(as_taken(second), 2)


def too_short(weights: DistributedWeights) -> DistributedWeights:
    return with_last_part(weights, lambda part: dataclasses.replace(part, num_bytes=0))


def half_a_block(weights: DistributedWeights) -> DistributedWeights:
    return with_last_part(weights, lambda part: dataclasses.replace(part, num_bytes=part.num_bytes + 1))


def misplaced(weights: DistributedWeights) -> DistributedWeights:
    first, *rest = weights.entries
    return dataclasses.replace(weights, entries=(dataclasses.replace(first, offset=2), *rest))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, "checksum"),
        (too_short, "do not lie within"),
        (half_a_block, "do not lie within"),
        (misplaced, "lies at byte 2: the manifest is damaged"),
        (lacking_a_tensor, "lack 1 tensors"),
    ],
)
def test_what_is_damaged_is_refused_and_the_next_is_taken(channel, spoil, message):
    with pytest.raises(WeightUpdateError, match=message):
        as_taken(spoil(channel.write(parameters(1))))
    assert is_of(as_taken(channel.write(parameters(2))), 2)


def test_the_checksum_tells_a_changed_byte_and_blocks_that_changed_places():
    data = torch.arange(4 * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8)
    data[:BLOCK_BYTES] = 7
    changed, moved = data.clone(), data.roll(BLOCK_BYTES)
    changed[BLOCK_BYTES + 3] += 1
    assert len({checksum(data), checksum(changed), checksum(moved)}) == 3
    assert checksum(data) == checksum(data.clone())


LARGE = {name: torch.arange(number, dtype=torch.float32) for name, number in (("a", 700), ("b", 9000), ("c", 3))}


def test_several_ranks_hold_equally_many_bytes():
    channels = Channels(layout(LARGE.items()), timeout_s=DEADLINE_S, num_ranks=3)
    weights = channels.write(LARGE)
    assert [part.num_bytes for part in weights.parts] == [4 * BLOCK_BYTES, 4 * BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert len({part.port for part in weights.parts}) == 3
    data = torch.empty(weights.num_bytes, dtype=torch.uint8)
    take(dataclasses.asdict(weights), data, group="g", num_members=1, device=data.device)
    taken = dict(tensors_over(data, [dataclasses.asdict(entry) for entry in weights.entries]))
    assert taken.keys() == LARGE.keys()
    assert all(torch.equal(taken[name], LARGE[name]) for name in LARGE)
    channels.close()


def test_a_model_may_be_too_small_for_all_ranks():
    channels = Channels(layout(parameters(0).items(), torch.float32), timeout_s=DEADLINE_S)
    weights = channels.write(parameters(1))
    assert len(weights.parts) == 1
    assert is_of(as_taken(weights), 1)
    channels.close()


def test_who_does_not_know_the_name_is_sent_nothing(channel):
    part = channel.write(parameters(1)).parts[0]
    store = connect(HOST, part.port, DEADLINE_S)
    overheard = Request.of(part.name, group="somebody", num_members=1)
    ask(store, dataclasses.replace(overheard, group="stranger"))
    assert b"refused" in store.get("stranger/answer")


def never_comes(part: WeightPart) -> None:
    """A server that asks, and is not heard of again."""
    store = connect(part.host, part.port, DEADLINE_S)
    ask(store, Request.of(part.name, group="never", num_members=1))


def comes_to_the_group_without_the_other(part: WeightPart) -> None:
    """A server of two processes, of which one dies before they are a group with the trainer."""
    store = connect(part.host, part.port, DEADLINE_S)
    ask(store, Request.of(part.name, group="half", num_members=2))
    store.set("half/gpu/1", "")
    store.set("half/gpu/2", "")
    assert store.get("half/answer")  # the trainer waits for both now


@pytest.mark.parametrize("fails", [never_comes, comes_to_the_group_without_the_other])
def test_a_member_that_fails_costs_nobody_else(fails, channel):
    weights = channel.write(parameters(1))
    fails(weights.parts[0])
    assert is_of(as_taken(weights), 1)


@pytest.mark.parametrize("text", ["no json", "[]", '{"proof": 1}', '{"proof": "a", "group": "b", "num_members": "c"}'])
def test_what_a_stranger_writes_ends_nothing(channel, text):
    weights = channel.write(parameters(1))
    store = connect(HOST, weights.parts[0].port, DEADLINE_S)
    number = int(store.get("next"))
    while store.compare_set(f"request/{number}", "", text) != text.encode():
        number += 1
    assert is_of(as_taken(weights), 1)


def test_requests_that_come_at_once_take_numbers_without_a_gap():
    store = open_store(HOST, DEADLINE_S)
    sent = [Request.of("w", group=str(number), num_members=1) for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(lambda one: ask(connect(HOST, store.port, DEADLINE_S), one), one) for one in sent]
        found = [next_request(store, number) for number in range(1, 21)]
        assert [one.result() for one in asking] == [None] * 20
    assert sorted(found, key=sent.index) == sent


def test_it_listens_at_its_address_alone(channel):
    port = channel.write(parameters(1)).parts[0].port
    with socket.create_connection((HOST, port)):
        pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=DEADLINE_S)


def test_parameters_of_another_model_are_refused(channel):
    with pytest.raises(ValueError, match=r"norm\.bias"):
        channel.write({name: one for name, one in parameters(1).items() if name != "norm.bias"})


def test_after_close_nothing_is_sent():
    before = set(threading.enumerate())
    channel = open_channel()
    weights = dataclasses.replace(channel.write(parameters(1)), timeout_s=0.5)
    channel.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(WeightUpdateError, match="did not send"):
        as_taken(weights)
