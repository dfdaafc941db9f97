"""The weights that every server of a fleet has to serve, and how one that does not is brought to them.

    label right ──────────────────────────────▶ it may serve
    label wrong ──▶ load, or push to it alone ──▶ label read back ──▶ it may serve
                       └─ a push to one that is ahead: a model first, as 0:0, for versions only go up

A push in memory is double-buffered by its sender: one that has been overwritten meanwhile fails its checksum, and the
server is brought to the newer weights the next time. Knows one server at a time, and no state of it.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from areal_agent.engine.fleet.member import MemberEngine
from areal_agent.engine_types import PauseMode, Weights
from areal_agent.errors import EngineError, EngineUnreachable, WeightUpdateError
from areal_agent.types import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """The version, and where its weights are: a model's folder, or what was pushed as `push_id`."""

    version: WeightVersion
    source: Path | Weights | None  # None: nobody has said
    push_id: str = ""
    base: Path | None = None  # a model folder that a push may follow on; None: that which a server was started with


async def bring_to(engine: MemberEngine, due: Due, *, is_label_believed: bool = True) -> None:
    """Return when the server serves these weights. Raises EngineError when it does not."""
    info = await engine.info()
    served = info.weight_version
    if served == due.version and (is_label_believed or due.source is None) and await engine.health():
        await engine.resume()  # a push that broke off may have left it paused
        return
    match due.source:
        case None:
            raise WeightUpdateError(
                f"{engine.base_url} serves version {served}, and {due.version} is due, of which this fleet has no "
                "weights; start it with those, or wait for the next push"
            )
        case Path() as model:
            await engine.load(model, due.version)
        case weights:
            if served >= due.version:
                await engine.load(due.base or Path(info.model_path), WeightVersion())
            await _push(engine, due.push_id, weights, due.version)
    await require_version(engine, due.version)
    if not await engine.health():
        raise EngineUnreachable(f"{engine.base_url} does not serve after it was given version {due.version}")


async def require_version(engine: MemberEngine, version: WeightVersion) -> None:
    """Read the label back. Raises WeightUpdateError when it is another."""
    served = (await engine.info()).weight_version
    if served != version:
        raise WeightUpdateError(f"{engine.base_url} says that it serves {served} after a push of {version}")


async def _push(engine: MemberEngine, push_id: str, weights: Weights, version: WeightVersion) -> None:
    """To this one alone. Where it fails it stays paused: whatever it serves, it is not what is due."""
    try:
        await engine.begin_push(push_id)
        await engine.send_push(push_id, weights)
        await engine.pause(PauseMode.RETRACT)
        await engine.commit_push(push_id, version)
        await engine.resume()
    except BaseException:
        with contextlib.suppress(EngineError):
            await engine.abort_push(push_id)
        raise
