"""`GET /metrics`:

- it is in Prometheus' text format, and its counters equal the gateway's
- turns are in the latency histogram, including failed ones
- bytes are counted in both directions
- no label names a session
- this machine needs no key, another one needs the admin key
"""

import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from areal_agent.gateway.auth import is_loopback

from .conftest import ADMIN_KEY, OpenWorld, World

PREFIX = "areal_agent_gateway_"


async def scrape(world: World) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels."""
    async with world.http.get(f"{world.url}/metrics") as response:
        assert response.status == 200
        families = text_string_to_metric_families(await response.text())
        return {
            (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


async def test_counters(open_world: OpenWorld) -> None:
    world = await open_world("ab<|im_end|>", "c<|im_end|>")
    agent = await world.start()
    await world.start()
    await agent.ask()
    await agent.ask()
    await agent.post_chat(messages=[])
    samples = await scrape(world)
    stats = world.gateway.stats()
    assert samples["turns_total", ()] == stats.turns == 2
    assert samples["generated_tokens_total", ()] == stats.generated_tokens == 5
    assert samples["open_sessions", ()] == 2
    assert samples["errors_total", (("status", "400"),)] == 1
    assert samples["forks_total", (("reason", "repeated"),)] == 1
    assert samples["turn_seconds_count", ()] == 3


async def test_bytes(open_world: OpenWorld) -> None:
    world = await open_world()
    before = await scrape(world)
    await world.call("/nope", b"x" * 10_000)
    after = await scrape(world)
    assert 10_000 < after["received_bytes_total", ()] - before["received_bytes_total", ()] < 11_000
    assert after["sent_bytes_total", ()] > before["sent_bytes_total", ()]


async def test_labels_name_no_session(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>")
    agent = await world.start(session_id="session-7", group_id="group-7")
    await agent.ask()
    labels = {name for _, pairs in await scrape(world) for name, _ in pairs}
    assert labels <= {"le", "reason", "status"}


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [(("127.0.0.1", 1), True), (("::1", 1, 0, 0), True), (("192.0.2.1", 1), False), (("fe80::1%eth0", 1, 0, 0), False)],
)
def test_what_is_this_machine(peer: object, is_here: bool) -> None:
    assert is_loopback(peer) is is_here


def outer_address() -> str | None:
    """Return the address from which this machine would call another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.skipif(outer_address() is None, reason="this machine has no address but loopback")
async def test_from_another_address(open_world: OpenWorld) -> None:
    world = await open_world()
    served = await world.gateway.serve("0.0.0.0")
    try:
        url = f"http://{outer_address()}:{served.base_url.rsplit(':', 1)[1]}"
        async with world.http.get(f"{url}/metrics") as response:
            assert response.status == 401
        async with world.http.get(f"{url}/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
            assert response.status == 200
        async with world.http.get(f"{url}/health") as response:
            assert response.status == 200
    finally:
        await served.aclose()
