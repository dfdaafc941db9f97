"""Which tiny model a config names: 1. `tiny:module:function` takes demonstrations that can be found; 2. any other is
refused before anything starts, with what would do.
"""

import pytest

from areal_agent.errors import ConfigError
from areal_agent.run.preflight import check_model


@pytest.mark.parametrize("model", ["tiny", "tiny:envs.code.tiny.demonstrations:demonstrations"])
def test_demonstrations_that_are_there(model: str) -> None:
    check_model(model)


@pytest.mark.parametrize("model", ["tiny:", "tiny:no_such_module:f", "tiny:envs.nothing.here:f", "tiny:envs.code"])
def test_demonstrations_that_are_not(model: str) -> None:
    with pytest.raises(ConfigError, match="give 'tiny:module:function'"):
        check_model(model)
