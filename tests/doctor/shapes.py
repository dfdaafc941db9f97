"""The sizes of published models, for tests that reach no hub."""

from areal_agent.doctor.scaling import SHAPES

QWEN3_06B, QWEN3_17B, QWEN3_4B = (SHAPES[f"Qwen3-{size}"] for size in ("0.6B", "1.7B", "4B"))
