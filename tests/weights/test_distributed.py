"""The channel over torch.distributed, and the embedded engine's own receiver at its other end.

- The engine takes what was written, in float32 and bfloat16, in one bucket or in many; tied weights are sent once.
- Who asks late, or with others at once, is sent the same; who asks for what was written before is refused.
- What is damaged on its way is refused; so is a record of weights that do not lie where it says. The checksum tells a
  changed byte, and blocks that changed places.
- A server that fails costs nobody else: others are sent the weights meanwhile.
- Requests that come at once are all heard, and what a stranger writes into the store ends nothing.
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

from areal_agent.engine.embedded.model import WeightLayout, take_weights
from areal_agent.engine.embedded.transfer import BLOCK_BYTES, Request, ask, checksum, connect, next_request, open_store
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DistributedWeights
from areal_agent.weights.channels import DistributedChannel, layout
from tests.engine.transfers import damaged, from_nobody, lacking_a_tensor
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
    return dataclasses.replace(weights, num_bytes=0)


def half_a_block(weights: DistributedWeights) -> DistributedWeights:
    return dataclasses.replace(weights, num_bytes=weights.num_bytes + 1)


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


def never_comes(weights: DistributedWeights) -> None:
    """A server that asks, and is not heard of again."""
    store = connect(weights.host, weights.port, DEADLINE_S)
    ask(store, Request(what=weights.name, group="never", num_members=1))


def comes_to_the_group_without_the_other(weights: DistributedWeights) -> None:
    """A server of two processes, of which one dies before they are a group with the trainer."""
    store = connect(weights.host, weights.port, DEADLINE_S)
    ask(store, Request(what=weights.name, group="half", num_members=2))
    store.set("half/gpu/1", "")
    store.set("half/gpu/2", "")
    assert store.get("half/answer")  # the trainer waits for both now


@pytest.mark.parametrize("fails", [never_comes, comes_to_the_group_without_the_other])
def test_a_member_that_fails_costs_nobody_else(fails, channel):
    weights = channel.write(parameters(1))
    fails(weights)
    assert is_of(as_taken(weights), 1)


def test_a_trainer_that_is_gone_is_told(channel):
    gone = from_nobody(channel.write(parameters(1)))
    with pytest.raises(WeightUpdateError, match=f"trainer at {HOST}:{gone.port} did not send"):
        as_taken(gone)


@pytest.mark.parametrize("text", ["no json", "[]", '{"what": 1}', '{"what": "a", "group": "b", "num_members": "c"}'])
def test_what_a_stranger_writes_ends_nothing(channel, text):
    weights = channel.write(parameters(1))
    store = connect(weights.host, weights.port, DEADLINE_S)
    number = int(store.get("next"))
    while store.compare_set(f"request/{number}", "", text) != text.encode():
        number += 1
    assert is_of(as_taken(weights), 1)


def test_requests_that_come_at_once_take_numbers_without_a_gap():
    store = open_store(HOST, DEADLINE_S)
    sent = [Request(what="w", group=str(number), num_members=1) for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(lambda one: ask(connect(HOST, store.port, DEADLINE_S), one), one) for one in sent]
        found = [next_request(store, number) for number in range(1, 21)]
        assert [one.result() for one in asking] == [None] * 20
    assert sorted(found, key=sent.index) == sent


def test_it_listens_at_its_address_alone(channel):
    port = channel.write(parameters(1)).port
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
