"""Where the time of a run went, as a person reads it: a small table, and one line of advice. Pure.

It knows the activities of both sides by name, and the config keys that change how long they take.
"""

from collections.abc import Mapping
from itertools import zip_longest

from areal_agent.observe.rows import Spent
from areal_agent.observe.step_view import LEAST_SHARE, words

WORTH_ADVICE = 0.2
"""The share of the time from which a wait is worth a change of the config."""


def time_table(spent: Spent) -> str:
    """Both sides in columns of their own, the longest activities first; what is less than half a percent is left out.

    >>> engine = {"generating": 6.0, "waiting_for_agents": 4.0}
    >>> print(time_table(Spent(wall_s=10.0, engine=engine, trainer={"training": 10.0})))
    where 10 s went:  engine                       trainer
                       60%  generating             100%  training
                       40%  waiting for agents
    """
    title = f"where {spent.wall_s:.0f} s went:"
    sides = (_column("engine", spent.engine, spent), _column("trainer", spent.trainer, spent))
    lines = [
        f"{title if number == 0 else '':<{len(title)}}  {engine:<27}  {trainer}".rstrip()
        for number, (engine, trainer) in enumerate(zip_longest(*sides, fillvalue=""))
    ]
    return "\n".join(lines)


def _column(title: str, seconds: Mapping[str, float], spent: Spent) -> list[str]:
    shares = sorted(((spent.share(one), name) for name, one in seconds.items()), reverse=True)
    return [title, *(f"{share:4.0%}  {words(name)}" for share, name in shares if share >= LEAST_SHARE)]


def advice(steps: Spent, *, engine_threads: int = 1) -> str:
    """The first thing to change, from where the time of the train steps went.

    The trainer's wait for rollouts has its cause on the engine's side; when the trainer hardly waits it is the limit.
    """
    if steps.wall_s <= 0:
        return ""
    engine = {name: steps.share(seconds) for name, seconds in steps.engine.items()}
    trainer = {name: steps.share(seconds) for name, seconds in steps.trainer.items()}
    waited = trainer.get("waiting_for_rollouts", 0.0)
    if trainer.get("saving", 0.0) >= WORTH_ADVICE:
        return f"saving took {trainer['saving']:.0%} of the time of the steps: a larger trainer.checkpoint_every"
    if waited >= WORTH_ADVICE:
        return f"in the steps the trainer waited {waited:.0%} of the time for rollouts, {_cause_of_waiting(engine)}"
    if engine.get("waiting_for_admission", 0.0) >= WORTH_ADVICE:
        return (
            f"in the steps the engine waited {engine['waiting_for_admission']:.0%} of the time for the trainer: "
            f"more trainer.threads{', or fewer engine.threads' if engine_threads > 1 else ''}"
        )
    return "in the steps neither side waited much for the other"


def _cause_of_waiting(engine: Mapping[str, float]) -> str:
    """What most of the engine's time went to, and what would help."""
    causes = {
        "generating": "while the engine generated: a faster engine, or a larger max_staleness",
        "evaluating": "while the engine evaluated: a larger eval.every",
        "waiting_for_agents": "while the engine waited for agents and their tools: more rollouts at once "
        "(rollout.max_concurrent), or a larger max_staleness",
        "waiting_for_admission": "while the staleness bound let none run: a larger max_staleness",
        "waiting_for_gateway": "while requests were on their way: more rollout.workers",
        "paused_for_push": "while a push held the engine: larger steps (batch_size)",
    }
    main = max(causes, key=lambda name: engine.get(name, 0.0))
    return causes[main]
