"""The config section of what a person sees."""

from typing import Literal

from areal_agent.section import Section


class ObserveConfig(Section):
    """What a run shows while it runs; metrics.jsonl, curve.png and summary.json are always written."""

    progress: Literal["auto", "plain", "none"] = "auto"
    """`auto`: a live bar in a terminal, one line a step elsewhere."""
