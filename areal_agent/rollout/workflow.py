"""What a user may hand in as a workflow, and how it becomes one callable. It knows nothing of sessions or engines."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

from areal_agent.errors import ConfigError
from areal_agent.rollout.context import Rollout
from areal_agent.rollout.tasks import import_object

Workflow = Callable[[dict[str, Any], Rollout], Awaitable[object]]
"""`async def solve(task, rollout) -> float | bool | int | None | {completion_id: float}`."""


def load_workflow(source: object) -> Workflow:
    """Accepts `"package.module:name"`, an `async def`, a callable instance, or an object with `async def run`.

    Raises ConfigError for anything else, naming it.
    """
    name = repr(source)
    found = import_object(source, "workflow") if isinstance(source, str) else source
    if inspect.isclass(found):
        raise ConfigError(f"workflow: {name} is a class; give an instance, or a function")
    if inspect.iscoroutinefunction(getattr(found, "run", None)):
        return _agent_workflow(found)
    call = found if inspect.isroutine(found) else getattr(found, "__call__", found)  # noqa: B004
    if not inspect.iscoroutinefunction(call):
        kind = "a plain function" if inspect.isroutine(found) else f"a {type(found).__name__}"
        raise ConfigError(f"workflow: {name} is {kind}, not a coroutine; write it as 'async def solve(task, rollout)'")
    _check_signature(call, name)
    return cast(Workflow, found)


def _check_signature(call: Callable[..., object], name: str) -> None:
    try:
        inspect.signature(call).bind({}, None)
    except TypeError:
        raise ConfigError(
            f"workflow: {name} takes {inspect.signature(call)}; it is called with two arguments, (task, rollout)"
        ) from None


def _agent_workflow(agent: Any) -> Workflow:
    """AReaL's form: an object whose `run(data, base_url=, api_key=, http_client=)` calls the model by itself."""

    async def solve(task: dict[str, Any], rollout: Rollout) -> object:
        return await agent.run(
            task, base_url=rollout.base_url, api_key=rollout.api_key, http_client=rollout.http_client
        )

    return solve
