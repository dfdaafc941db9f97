"""`GET /metrics` reports under SGLang's names: running and waiting requests, the room, the prefix cache, sampled tokens
and their rate, latencies.

The rate is measured since the start at first, then since the last reading, and over at least the window; it is 0 when
nothing was sampled or no time has passed.
"""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from areal_agent.engine.embedded.scheduler import WINDOW_S, Throughput
from areal_agent.engine.wire import control


async def read(base_url: str) -> dict[str, float]:
    async with aiohttp.ClientSession(base_url) as session, session.get(control.METRICS) as response:
        assert response.status == 200 and response.content_type == "text/plain"
        text = await response.text()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_work_done_and_waiting(tiny, serve, ask):
    async with serve(tiny, num_slots=2) as served:
        for _ in range(2):
            await served.engine.generate(ask(1, prompt_length=20, max_tokens=5))
        waiting = await served.queued(ask(2))
        told = await read(served.engine.base_url)
        await served.engine.abort(ask(2).request_id)
        await waiting
        later = await read(served.engine.base_url)
    assert (told["sglang:num_running_reqs"], told["sglang:num_queue_reqs"]) == (0, 1)
    assert told["sglang:max_total_num_tokens"] == 2 * 2 * 512
    assert (told["sglang:prompt_tokens_total"], told["sglang:cached_tokens_total"]) == (40, 19)
    assert told["sglang:cache_hit_rate"] == 19 / 40
    assert told["sglang:generation_tokens_total"] == 10
    assert told["sglang:gen_throughput"] > 0
    assert told["sglang:num_retracted_requests_total"] == 0
    for latency in ("sglang:time_to_first_token_seconds", "sglang:e2e_request_latency_seconds"):
        assert (told[f"{latency}_count"], later[f"{latency}_count"]) == (2, 2), "of requests that were not aborted"
        assert told[f"{latency}_sum"] > 0
    assert told["areal_agent:prefix_cache_tokens"] == 20 + 4
    assert (told["sglang:num_aborted_requests_total"], later["sglang:num_aborted_requests_total"]) == (0, 1)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rates(*steps: tuple[float, int]) -> list[float]:
    """The rates read after so many seconds each, when so many more tokens were sampled."""
    clock, num_tokens, told = Clock(), 0, list[float]()
    throughput = Throughput(clock)
    for seconds, more in steps:
        clock.now_s += seconds
        num_tokens += more
        told.append(throughput.rate(num_tokens))
    return told


def test_the_rate_is_since_the_last_question_or_over_the_window_when_asked_often() -> None:
    assert rates((20, 100), (50, 50), (15, 0)) == [5.0, 1.0, 0.0]
    assert rates((0, 0), (0, 5)) == [0.0, 0.0], "when no time has passed"
    second = WINDOW_S / 10
    assert rates(*[(second, 10)] * 10)[-1] == 10 / second
    assert rates(*[(second, 10)] * 10, *[(second, 0)] * 5)[-1] == 50 / WINDOW_S
