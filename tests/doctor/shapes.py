"""The sizes of published models, for tests that reach no hub, and the table of docs/scaling.md: the doctor's estimates
for Qwen3 from 0.6B to 32B, on one GPU and on eight."""

from collections.abc import Mapping

from areal_agent.config import Config
from areal_agent.doctor.findings import GIB
from areal_agent.doctor.machines import Machine
from areal_agent.doctor.memory import TrainerMemory, estimate
from areal_agent.doctor.model import ModelShape
from areal_agent.doctor.settings import checkpoints_bytes, num_copies


def qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, is_tied: bool) -> ModelShape:
    """Return the shape of a Qwen3, from its config.json on the hub."""
    return ModelShape.of(
        {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": is_tied,
            "torch_dtype": "bfloat16",
        }
    )


def distilled(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int
) -> ModelShape:
    """Return the shape of a DeepSeek-R1-Distill-Qwen, from its config.json on the hub."""
    return ModelShape.of(
        {
            "model_type": "qwen2",
            "vocab_size": 152_064,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
    )


SHAPES = {
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, is_tied=True),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, is_tied=True),
    "Qwen3-4B": qwen3(2560, 9728, 36, 32, is_tied=True),
    "Qwen3-8B": qwen3(4096, 12_288, 36, 32, is_tied=False),
    "Qwen3-14B": qwen3(5120, 17_408, 40, 40, is_tied=False),
    "Qwen3-32B": qwen3(5120, 25_600, 64, 64, is_tied=False),
}
QWEN3_06B, QWEN3_17B, QWEN3_4B = (SHAPES[f"Qwen3-{size}"] for size in ("0.6B", "1.7B", "4B"))

GPU_GIB = 80
LORA = {"rank": 32}
TRAINER = {"device": "cuda", "gradient_checkpointing": True, "tokens_per_micro_batch": 16_384}
SERVER = {"backend": "sglang", "python": "python", "device": "cuda", "max_context_tokens": 16_384}
SHARED: Mapping[str, object] = {**SERVER, "kv_tokens": 32_768, "server_args": ["--mem-fraction-static", "0.9"]}
APART: Mapping[str, object] = {
    **SERVER,
    "num_servers": 4,
    "server_args": ["--base-gpu-id", "4", "--mem-fraction-static", "0.8"],
}

HEAD = """| GiB | one GPU, all weights | with LoRA | eight: a GPU that trains | with LoRA | memory | `/dev/shm` | disk |
|---|---|---|---|---|---|---|---|"""


def table() -> str:
    """Return the table, in Markdown."""
    return "\n".join([HEAD, *(_row(name, shape) for name, shape in SHAPES.items())])


def _row(name: str, shape: ModelShape) -> str:
    """Return a model's needs: at the peak of GPU 0 in four set-ups, and what the third needs beside its GPUs."""
    one, eight = (Machine(memory_bytes=None, num_gpus=number, gpu_bytes=GPU_GIB * GIB) for number in (1, 8))
    whole, adapters = _config(APART, num_ranks=4), _config(APART, num_ranks=4, lora=LORA)
    needs = estimate(shape, whole, eight)
    on_gpu = (
        estimate(shape, _config(SHARED), one)[0],
        estimate(shape, _config(SHARED, lora=LORA), one)[0],
        needs[0],
        estimate(shape, adapters, eight)[0],
    )
    memory = TrainerMemory(shape=shape, config=whole, is_gpu=True)
    beside = (needs[None].total(), num_copies(whole) * memory.published_bytes, checkpoints_bytes(memory, whole))
    cells = [*(_of_gpu(parts.total()) for parts in on_gpu), *(f"{size / GIB:,.0f}" for size in beside)]
    return f"| {' | '.join([name, *cells])} |"


def _config(engine: Mapping[str, object], **trainer: object) -> Config:
    return Config.parse({"tasks": "tasks:load", "workflow": "flow:run", "engine": engine, "trainer": TRAINER | trainer})


def _of_gpu(num_bytes: int) -> str:
    """Return GiB, in parentheses where they do not fit a GPU."""
    size = f"{num_bytes / GIB:.0f}"
    return size if num_bytes <= GPU_GIB * GIB else f"({size})"
