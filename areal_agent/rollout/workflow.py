"""The forms of workflow that a user may give, and how each becomes one callable.

A plain function runs in a thread of its own while the event loop goes on. It is not a pool: at its end the interpreter
waits for a pool's threads, and one stuck in a user's code would keep the process alive for ever. The caller limits how
many run at once.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

from areal_agent.errors import ConfigError
from areal_agent.rollout.context import Rollout
from areal_agent.section import import_object

Result = TypeVar("Result")


async def run_in_thread(name: str, call: Callable[[], Result]) -> Result:
    """Run `call` in a thread; return or raise what it does. Cancelling leaves the thread behind: nothing can end it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(call)
        except StopIteration:  # a future cannot hold it
            tell(lambda: outcome.set_exception(RuntimeError("StopIteration was raised")))
        except BaseException as error:
            reason = error  # `error` is deleted before the loop reads it
            tell(lambda: outcome.set_exception(reason))
        else:
            tell(lambda: outcome.set_result(result))

    def tell(settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for the outcome
            loop.call_soon_threadsafe(lambda: None if outcome.done() else settle())

    threading.Thread(target=work, name=name, daemon=True).start()
    return await outcome


Workflow = Callable[[dict[str, Any], Rollout], Awaitable[object]]
"""`async def solve(task, rollout) -> float | bool | int | None | {completion_id: float}`."""


def load_workflow(source: object) -> Workflow:
    """Make a workflow of `"package.module:name"`, a function, a callable, an object with `run`, or its class.

    A plain function runs in a thread. Raises ConfigError for anything else.
    """
    name = repr(source)
    found = import_object(source, "workflow") if isinstance(source, str) else source
    if inspect.isclass(found):
        if not _fits(found):
            raise ConfigError(
                f"workflow: {name} is a class whose instances need arguments; give an instance, or a function"
            )
        found = found()
    run = getattr(found, "run", None)
    if inspect.ismethod(run) or inspect.iscoroutinefunction(run):
        return _agent_workflow(run, name)
    if not callable(found):
        raise ConfigError(
            f"workflow: {name} is a {type(found).__name__}; write it as 'async def solve(task, rollout)', or as 'def'"
        )
    if not _fits(found, {}, None):
        raise ConfigError(
            f"workflow: {name} takes {inspect.signature(found)}; it is called with two arguments, (task, rollout)"
        )
    return cast(Workflow, found) if _is_coroutine(found) else _in_thread(found)


def import_path(source: object) -> str:
    """Return the `package.module:name` under which another process finds the same workflow.

    Raises ConfigError for objects that only this process has: a closure, an instance, a function of the main program.
    """
    if isinstance(source, str):
        return source
    module, name = getattr(source, "__module__", None), getattr(source, "__qualname__", None)
    path = f"{module}:{name}"
    is_found = False
    with contextlib.suppress(ConfigError):
        is_found = module != "__main__" and import_object(path, "workflow") is source
    if not is_found:
        raise ConfigError(
            f"workflow: {source!r} cannot be imported by another process, which rollout.workers > 0 needs; make it a "
            "function (or an instance) at the top level of a module and give 'package.module:name', or set "
            "rollout.workers=0"
        )
    return path


def _fits(call: Callable[..., object], *args: object, **kwargs: object) -> bool:
    try:
        inspect.signature(call).bind(*args, **kwargs)
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        return False
    return True


def _is_coroutine(call: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004


def _in_thread(call: Callable[..., object]) -> Workflow:
    async def solve(task: dict[str, Any], rollout: Rollout) -> object:
        return await _threaded(partial(call, task, rollout))

    return solve


def _agent_workflow(run: Callable[..., object], name: str) -> Workflow:
    """Adapt AReaL's form: an object whose `run(data, base_url=, api_key=, http_client=)` calls the model itself.

    The URL is the gateway's without /v1: Anthropic's clients add that, and OpenAI's paths are served without it, too.
    """
    if not _fits(run, {}, base_url="", api_key="", http_client=None):
        raise ConfigError(
            f"workflow: the method run of {name} takes {inspect.signature(run)}; it is called as "
            "run(task, base_url=..., api_key=..., http_client=...): write it as 'async def run(self, data, **kwargs)'"
        )

    async def solve(task: dict[str, Any], rollout: Rollout) -> object:
        call = partial(run, task, base_url=rollout.anthropic_base_url, api_key=rollout.api_key)
        if inspect.iscoroutinefunction(run):
            return await cast(Awaitable[object], call(http_client=rollout.http_client))
        return await _threaded(partial(call, http_client=rollout.sync_http_client))

    return solve


async def _threaded(call: Callable[[], object]) -> object:
    """Run it in a thread. When a plain function returns a coroutine (a lambda, a decorator), that is awaited."""
    returned = await run_in_thread("workflow", call)
    return await returned if inspect.isawaitable(returned) else returned
