"""The public names do not change by accident: 1. `areal_agent`'s; 2. what a workflow finds on `rollout`; 3. `Run`'s."""

import inspect

import areal_agent
from areal_agent import Role, Rollout
from areal_agent.run import Run


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_names_of_the_package() -> None:
    names = "ArealAgentError Completion ConfigError Fate Reject Rewards Role Rollout RolloutBatch SandboxError "
    names += "Status Task TokenRecord Trajectory TrajectoryGroup Turn VersionSpan WeightVersion"
    assert areal_agent.__all__ == names.split()
    assert all(hasattr(areal_agent, name) for name in areal_agent.__all__)


def test_names_of_a_rollout() -> None:
    methods = {"aclose", "enter", "log", "opened_roles", "reject", "reward", "role", "shared"}
    assert public(Rollout) == methods | {"anthropic_base_url", "sync_client"}
    assert public(Role) == {"anthropic_base_url", "log", "reward", "sync_client"}
    attributes = set(inspect.signature(Rollout.__init__).parameters) - {"self", "shared", "open_role"}
    clients = {"client", "sync_client", "http_client", "sync_http_client"}
    assert attributes == clients | {"base_url", "api_key", "model", "seed", "is_eval", "sandbox"}


def test_names_of_a_run() -> None:
    calls = {"prepare_batch", "rollout_batch", "train_step", "push", "evaluate", "save"}
    assert calls <= public(Run)
    assert all(inspect.iscoroutinefunction(getattr(Run, name)) for name in calls)
