"""transformers' own `generate` on a GPU, in a process of its own: prints the tokens per second of each round.

    python benchmarks/engine/gpu_generate.py MODEL_FOLDER DEVICE REQUESTS PROMPT_TOKENS NEW_TOKENS ROUNDS

It samples at temperature 1 and, unlike our engine, keeps no log-probabilities.
"""

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> int:
    folder, device = sys.argv[1], torch.device(sys.argv[2])
    num_requests, prompt_tokens, new_tokens, rounds = map(int, sys.argv[3:])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device)
    for number in range(rounds + 1):
        ids = torch.randint(model.config.vocab_size, (num_requests, prompt_tokens), device=device)
        started_s = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=new_tokens,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
        assert answer.cpu().shape == (num_requests, prompt_tokens + new_tokens)  # the copy waits for the GPU
        if number:  # the first one warms up
            print(f"{num_requests * new_tokens / (time.perf_counter() - started_s):.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
