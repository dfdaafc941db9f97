"""A side without a server, in a process of its own: generates batches and prints generated tokens per CPU-second.

    python benchmarks/engine/offline.py SIDE MODEL_FOLDER NUM_REQUESTS ROUNDS

SIDE: `generate` (transformers' own), `continuous` (its continuous batching), or `floor`: the time of the matrix
products and of reading keys and values alone, on one thread.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PROMPT_TOKENS, NEW_TOKENS = 128, 128


def main() -> int:
    side, folder, num_requests, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generate = {"generate": by_generate, "continuous": by_continuous_batching, "floor": floor}[side]
    if side == "floor":
        print(f"{num_requests * NEW_TOKENS / floor(model, num_requests):.1f}")
        return 0
    generate(model, num_requests)  # warms up
    for _ in range(rounds):
        started_s = time.process_time()
        generate(model, num_requests)
        print(f"{num_requests * NEW_TOKENS / (time.process_time() - started_s):.1f}", flush=True)
    return 0


def prompts(model: Any, num_requests: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (num_requests, PROMPT_TOKENS))


def by_generate(model: Any, num_requests: int) -> float:
    ids = prompts(model, num_requests)
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for step, logits in enumerate(answer.logits):
        torch.log_softmax(logits, dim=-1).gather(1, answer.sequences[:, PROMPT_TOKENS + step, None])
    return 0.0


def by_continuous_batching(model: Any, num_requests: int) -> float:
    model.set_attn_implementation("paged|sdpa")
    # by default it takes nearly all memory for its cache, and a mask over all of that
    paging = ContinuousBatchingConfig(
        use_cuda_graph=False,
        page_size=32,
        num_blocks=num_requests * (PROMPT_TOKENS + NEW_TOKENS) // 32 + 16,
        max_batch_tokens=max(512, num_requests),
    )
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, top_k=50, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(
        inputs=prompts(model, num_requests).tolist(),
        generation_config=config,
        continuous_batching_config=paging,
        progress_bar=False,
    )
    return 0.0


def floor(model: Any, num_requests: int) -> float:
    """Return the CPU-seconds of all requests' products, at full size, and of reading keys and values once per step.

    Each layer has weights of its own, as in the model: they come from the caches that hold all of it.
    """
    config = model.config
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = [
        (heads, config.hidden_size),
        (config.hidden_size, config.num_attention_heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    layers = layer * config.num_hidden_layers
    chunk = 512
    prefill_s = products_s(chunk, layers) / chunk
    mean_length = PROMPT_TOKENS + NEW_TOKENS // 2
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * mean_length
    keys = torch.randn(num_requests * kv_numbers)
    read_s = median_s(lambda: keys.sum())
    step_s = products_s(num_requests, [*layers, (config.vocab_size, config.hidden_size)]) + read_s
    return NEW_TOKENS * step_s + num_requests * PROMPT_TOKENS * prefill_s


def products_s(num_rows: int, shapes: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of all products with weights of these shapes, one after the other."""
    pairs = [(torch.randn(num_rows, shape[1]), torch.randn(shape)) for shape in shapes]
    return median_s(lambda: [linear(x, weight) for x, weight in pairs])


def median_s(action: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(30):
        started_s = time.thread_time()
        action()
        times.append(time.thread_time() - started_s)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
