"""The options of vLLM's servers: each has an effect where it is given, or is refused with the remedy.

- servers that are started need a Python, those that run a backend, and the device is that of vLLM's build
- a run of several processes may push as it likes: the server itself lets requests end
- adapters alone go to servers that the run starts
"""

import pytest
from pydantic import ValidationError

from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError

URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


def test_urls_may_be_of_vllm():
    assert EngineConfig(backend="vllm", urls=URLS).urls == URLS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "vllm"}, "engine.backend is 'vllm': set engine.python"),
        ({"backend": "vllm", "python": "p", "device": "cpu"}, "engine.device .*build decides that"),
        ({"backend": "vllm", "python": "p", "first_gpu": 2}, "engine.first_gpu is 2, but engine.device is 'auto'"),
        ({"backend": "vllm", "urls": URLS, "first_gpu": 2, "device": "cuda"}, "that the run starts"),
        ({"first_gpu": 2}, "engine.first_gpu is 2, but engine.device is 'auto'"),
        (
            {"backend": "vllm", "urls": URLS, "kv_tokens": 1000},
            "engine.kv_tokens only applies to servers that the run starts",
        ),
        ({"backend": "vllm", "urls": URLS, "url": URLS[0]}, "engine.url"),
        ({"backend": "vllm", "python": "p", "num_servers": 2, "port": 8000}, "leave port out"),
    ],
)
def test_options_that_do_not_go_together(values, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(values)


@pytest.mark.parametrize("on_push", ["interrupt", "turn_boundary", "drain"])
def test_several_processes_may_wait_for_requests_to_end(on_push):
    values = {
        "workflow": "m:f",
        "tasks": "m:f",
        "rollout": {"workers": 2},
        "engine": {"backend": "vllm", "urls": URLS, "on_push": on_push},
    }
    assert Config.parse(values).engine.on_push == on_push


def with_adapters(engine: object, **trainer: object) -> dict[str, object]:
    return {
        "workflow": "m:f",
        "tasks": "m:f",
        "engine": engine,
        "trainer": {"lora": {"push": "adapter"}, **trainer},
    }


def test_servers_that_are_started_may_get_adapters_alone():
    config = Config.parse(with_adapters({"backend": "vllm", "python": "p"}))
    assert config.trainer.lora is not None and config.trainer.lora.push == "adapter"


def test_adapters_for_which_vllm_has_no_room_are_merged():
    engine = {"backend": "vllm", "python": "p"}
    assert Config.parse(with_adapters(engine, lora={"push": "adapter", "rank": 512}))
    with pytest.raises(ConfigError, match=r"rank is 513, but vLLM supports ranks up to 512; lower the rank"):
        Config.parse(with_adapters(engine, lora={"push": "adapter", "rank": 513}))


@pytest.mark.parametrize("engine", [{}, {"backend": "sglang", "python": "p"}, {"backend": "vllm", "urls": URLS}])
def test_what_applies_no_adapters_gets_none(engine):
    with pytest.raises(ConfigError, match=r"trainer\.lora\.push is 'adapter', which needs vLLM servers"):
        Config.parse(with_adapters(engine))
