"""The options of SGLang's servers: each has an effect where it is given, or is refused with the remedy.

- `urls` implies the backend; servers that the run starts need a Python; both at once are refused
- options of another backend, or of servers that the run starts, are refused where they mean nothing
- a run of several processes must push by interruption: they do not see each other's requests
"""

import pytest
from pydantic import ValidationError

from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError

URLS = ("http://127.0.0.1:30000", "http://127.0.0.1:30001")


def test_urls_are_of_sglang():
    assert EngineConfig(urls=URLS).backend == "sglang"
    assert EngineConfig.model_validate({"urls": list(URLS)}).urls == URLS


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
    ],
)
def test_options_that_do_not_go_together(values, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(values)


@pytest.mark.parametrize("on_push", ["turn_boundary", "drain"])
def test_workers_do_not_see_each_others_requests(on_push):
    values = {
        "workflow": "m:f",
        "tasks": "m:f",
        "rollout": {"workers": 2},
        "engine": {"urls": URLS, "on_push": on_push},
    }
    with pytest.raises(ConfigError, match=f"engine.on_push is '{on_push}'"):
        Config.parse(values)
    assert Config.parse(values | {"engine": {"urls": URLS}}).engine.urls == URLS
