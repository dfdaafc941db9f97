"""The options of SGLang's and vLLM's servers: each has an effect where it is given, or is refused with the remedy.

- `urls` implies SGLang; servers that the run starts need a Python; both at once are refused
- options of another backend, or of servers that the run starts, are refused where they mean nothing
- with several processes, SGLang's servers must be pushed to by interruption: the processes do not see each other's
  requests; vLLM's servers themselves let requests end
- adapters alone go to vLLM's servers that the run starts
"""

import pytest
from pydantic import ValidationError

from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError

URLS = ("http://127.0.0.1:30000", "http://127.0.0.1:30001")
NAMES = {"workflow": "m:f", "tasks": "m:f"}


def test_urls_are_of_sglang_unless_the_backend_is_vllm():
    assert EngineConfig(urls=URLS).backend == "sglang"
    assert EngineConfig.model_validate({"urls": list(URLS)}).urls == URLS
    assert EngineConfig(backend="vllm", urls=URLS).urls == URLS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "sglang"}, "set engine.python"),
        ({"backend": "embedded", "urls": URLS}, "engine.urls only applies to engine.backend sglang and vllm"),
        ({"python": "/venv/bin/python"}, "engine.python only applies to engine.backend sglang"),
        ({"num_servers": 2, "port": 30000}, "leave port out"),
        ({"num_servers": 2, "leave_gib": 1.0}, "leave nothing for the others"),
        ({"server_args": ["--x"]}, "engine.server_args only applies to engine.backend sglang"),
        ({"urls": URLS, "python": "p"}, "engine.python only applies to servers that the run starts"),
        ({"urls": URLS, "kv_tokens": 1000}, "engine.kv_tokens only applies to servers that the run starts"),
        ({"urls": URLS, "threads": 2}, "engine.threads only applies to servers that the run starts"),
        ({"urls": ["127.0.0.1:1"]}, "should match pattern"),
        ({"urls": [URLS[0], URLS[0]]}, "twice"),
        ({"urls": URLS, "url": URLS[0]}, "engine.url"),
        ({"backend": "sglang", "python": "p", "num_servers": 2, "port": 30000}, "leave port out"),
        ({"backend": "vllm"}, "engine.backend is 'vllm': set engine.python"),
        ({"backend": "vllm", "python": "p", "device": "cpu"}, "engine.device .*build decides that"),
        ({"backend": "vllm", "python": "p", "first_gpu": 2}, "engine.first_gpu is 2, but engine.device is 'auto'"),
        ({"backend": "vllm", "urls": URLS, "first_gpu": 2, "device": "cuda"}, "that the run starts"),
        ({"first_gpu": 2}, "engine.first_gpu is 2, but engine.device is 'auto'"),
        (
            {"backend": "vllm", "urls": URLS, "kv_tokens": 1000},
            "engine.kv_tokens only applies to servers that the run starts",
        ),
    ],
)
def test_options_that_do_not_go_together(values, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(values)


def with_workers(engine: object) -> Config:
    return Config.parse(NAMES | {"rollout": {"workers": 2}, "engine": engine})


@pytest.mark.parametrize("on_push", ["turn_boundary", "drain"])
def test_only_vllm_lets_several_processes_wait_for_requests_to_end(on_push):
    with pytest.raises(ConfigError, match=f"engine.on_push is '{on_push}'"):
        with_workers({"urls": URLS, "on_push": on_push})
    assert with_workers({"urls": URLS}).engine.urls == URLS
    assert with_workers({"backend": "vllm", "urls": URLS, "on_push": on_push}).engine.on_push == on_push


def with_adapters(engine: object, **trainer: object) -> dict[str, object]:
    return NAMES | {"engine": engine, "trainer": {"lora": {"push": "adapter"}, **trainer}}


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
