"""`rollout`: what a workflow receives beside its task.

openai and httpx are imported for their types only, so that `import areal_agent` stays light.
"""

import asyncio
import contextlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self, TypeVar

from areal_agent.types import MAX_REWARD, ROLE

if TYPE_CHECKING:
    import httpx
    from openai import OpenAI

    from areal_agent.rollout.models import RolloutClient

Resource = TypeVar("Resource")


def as_reward(value: object) -> float:
    """Return a reward as a float: int, bool, float, Decimal, Fraction and numpy scalars are rewards.

    Raises TypeError for anything else, ValueError for NaN and for numbers too large for the trainer to add up.
    """
    item = getattr(value, "item", None)
    number = value
    if callable(item):
        with contextlib.suppress(Exception):  # an array or tensor of several numbers is refused below, with its text
            number = item()
    if not isinstance(number, numbers.Real | Decimal):
        raise TypeError(f"a reward is a number, got {value!r:.200} ({type(value).__name__}); {_remedy_for(value)}")
    try:
        reward = float(number)
    except OverflowError:  # an integer can be larger than any float
        reward = math.inf
    except ValueError:  # a signalling NaN of Decimal
        reward = math.nan
    if not abs(reward) <= MAX_REWARD:
        remedy = "it comes from 0 / 0 or the like; raise Reject if this rollout has no reward"
        raise ValueError(
            f"a reward is a number from {-MAX_REWARD:g} to {MAX_REWARD:g}, got {value!r:.200}; "
            f"{remedy if math.isnan(reward) else 'clip it or scale it down'}"
        )
    return reward


def _remedy_for(value: object) -> str:
    if inspect.isawaitable(value):
        return "await it"
    if isinstance(value, Mapping | list | tuple):
        return "return the final reward alone, and give each part with rollout.reward(value, name=...)"
    return "give an int, a float, a bool, a Decimal or a numpy scalar"


class SharedResources:
    """The resources that all rollouts of a process share (a sandbox pool, say), opened at first use."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: dict[object, asyncio.Future[Any]] = {}

    async def get(self, opener: object, open_it: Callable[[], AbstractAsyncContextManager[Resource]]) -> Resource:
        """Return the resource of `opener`. The first caller opens it; callers meanwhile wait for that."""
        if opener not in self._opened:
            future = self._opened[opener] = asyncio.get_running_loop().create_future()
            try:
                future.set_result(await self._stack.enter_async_context(open_it()))
            except BaseException as error:
                del self._opened[opener]  # the next caller tries again
                future.set_exception(error if isinstance(error, Exception) else RuntimeError("opening was cancelled"))
                future.exception()  # mark the error as seen: there may be no other waiter, and it is raised here anyway
                raise
        return await self._opened[opener]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()


class Role:
    """One role of a rollout: a session with a conversation, a key and rewards of its own. `Rollout` is the first one.

    Its siblings are the sessions of the same role in the group's other rollouts: only they are compared.

    - `client` is a stock `openai.AsyncOpenAI` without retries whose base URL is the gateway and whose key names this
      session. Everything sampled through it is recorded token by token. `client("judge")` is a client of another model,
      of the config's `rollout.models`; it is not trained, its calls are kept in `logged`, and if it fails, so does the
      rollout, as `infra`.
    - `sync_client` is its twin for a workflow that is a plain `def`: that runs in a thread, and when its rollout is
      cancelled its next call fails, since nothing else can end a thread.
    - `base_url` (it ends in `/v1`), `api_key` and `model` are the same for any other client or program.
    """

    def __init__(
        self, *, client: "RolloutClient", sync_client: "OpenAI", base_url: str, api_key: str, model: str
    ) -> None:
        self.client = client
        self.base_url = base_url
        self.api_key = api_key
        self.model = model
        self.rewards: dict[tuple[str | None, str | None], float] = {}  # by (completion id, name)
        self.logged: dict[str, Any] = {}
        self.client.logged = self.logged
        self._sync_client = sync_client

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for Anthropic's clients, which add /v1 themselves. Their key is `api_key`."""
        return self.base_url.removesuffix("/v1")

    @property
    def sync_client(self) -> "OpenAI":
        """A stock `openai.OpenAI` without retries, for plain functions. It would block the event loop."""
        return self._sync_client.copy(api_key=self.api_key)

    def reward(self, value: object, completion: str | None = None, name: str | None = None) -> None:
        """Give a reward: the final one, that of one completion (by its id), or a named part.

        A part is a metric, and adds to the final reward with its weight in `algorithm.reward_parts`. A later reward
        replaces an earlier one. Raises TypeError or ValueError when `value` is not such a number, and ValueError for a
        named part of one completion: parts belong to the whole conversation.
        """
        if completion is not None and name is not None:
            raise ValueError(
                f"a reward has a completion ({completion!r}) or a name ({name!r}), not both; leave one out"
            )
        self.rewards[completion, name] = as_reward(value)

    def log(self, **values: object) -> None:
        """Keep values with the trajectory: JSON types as they are, everything else as its repr."""
        self.logged.update(values)


class Rollout(Role):
    """One rollout, seen from inside the workflow. It has what a role has, and:

    - `http_client` and `sync_http_client` are httpx clients, for clients that take one.
    - `seed` is this rollout's own, `is_eval` is true in evaluations, and `sandbox` is the config's section.
    """

    def __init__(
        self,
        *,
        client: "RolloutClient",
        http_client: "httpx.AsyncClient",
        sync_client: "OpenAI",
        sync_http_client: "httpx.Client",
        base_url: str,
        api_key: str,
        model: str,
        seed: int,
        is_eval: bool,
        sandbox: Mapping[str, Any],
        shared: SharedResources,
        open_role: Callable[[str], Awaitable[Role]],
    ) -> None:
        super().__init__(client=client, sync_client=sync_client, base_url=base_url, api_key=api_key, model=model)
        self.http_client = http_client
        self.sync_http_client = sync_http_client
        self.seed = seed
        self.is_eval = is_eval
        self.sandbox = sandbox
        self.rejected: str | None = None
        self._shared = shared
        self._stack = AsyncExitStack()
        self._open_role = open_role
        self._roles: dict[str, asyncio.Future[Role]] = {}
        self._is_over = False

    async def role(self, name: str) -> Role:
        """Return another role of this rollout, which is opened at its first use and ends with the rollout.

        Raises ValueError for a name that is not of letters, digits and `_`, or begins with a digit.
        """
        if not ROLE.fullmatch(name):
            raise ValueError(f"a role is named {name!r:.100}; give it a name of letters, digits and _, like 'player_1'")
        if self._is_over:
            raise RuntimeError(f"the role {name!r} was asked for when the rollout had ended; open it before that")
        if name not in self._roles:
            self._roles[name] = asyncio.ensure_future(self._open_role(name))
        return await asyncio.shield(self._roles[name])

    async def opened_roles(self) -> Mapping[str, Role]:
        """Return the other roles by name; from now on none is opened. The runner calls it at the end."""
        self._is_over = True
        if self._roles:
            await asyncio.wait(self._roles.values())
        return {name: one.result() for name, one in self._roles.items() if one.exception() is None}

    def reject(self, reason: str) -> None:
        """Mark this rollout as not to be trained. `raise Reject(reason)` does the same and ends the workflow."""
        self.rejected = reason

    async def enter(self, manager: AbstractAsyncContextManager[Resource]) -> Resource:
        """Enter a context manager that is left when the rollout ends, however it ends."""
        return await self._stack.enter_async_context(manager)

    async def shared(self, opener: Callable[[Self], AbstractAsyncContextManager[Resource]]) -> Resource:
        """Return what `opener(rollout)` opens, shared by all rollouts with this `sandbox`: opened at first use."""
        return await self._shared.get((opener, *self.sandbox.items()), lambda: opener(self))

    async def aclose(self) -> None:
        """Leave the context managers that were entered, last first. The runner calls it."""
        await self._stack.aclose()
