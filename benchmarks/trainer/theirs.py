# pyright: basic, reportMissingImports=false
"""TRL's side, run by the Python of its own environment: `python theirs.py FOLDER NUM_STEPS ROWS` prints a line of JSON.

A GRPOTrainer as it is, given the records by `rollout_func` and a reward function; ROWS sequences go through it at
once. CPU time is that of its steps without what prepares a batch: forward, loss, gradient, optimiser.
"""

import json
import resource
import sys
import time
from itertools import count
from pathlib import Path

import torch
from datasets import Dataset
from records import GROUP_SIZE, read_records
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Meter(TrainerCallback):
    """Keeps the first gradient, and the CPU time of each step."""

    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}
        self.steps_s: list[float] = []
        self.preparing_s = 0.0
        self._started_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._started_s, self.preparing_s = time.process_time(), 0.0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        if not self.gradient and model is not None:
            self.gradient = {name: one.grad.clone() for name, one in model.named_parameters()}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.steps_s.append(time.process_time() - self._started_s - self.preparing_s)


class Measured(GRPOTrainer):
    """Counts what goes through the model, and leaves the preparation of batches out of the time."""

    meter: Meter
    num_cells = 0
    num_tokens = 0

    def _generate_and_score_completions(self, inputs):
        started_s = time.process_time()
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.meter.preparing_s += time.process_time() - started_s

    def _compute_loss(self, model, inputs):
        for part in ("prompt_mask", "completion_mask"):
            self.num_cells += inputs[part].numel()
            self.num_tokens += int(inputs[part].sum())
        return super()._compute_loss(model, inputs)


def main(folder: Path, num_steps: int, rows: int) -> None:
    torch.set_num_threads(1)
    prompts, completions, rewards = read_records(folder)
    order = {tuple(ids.tolist()): index for index, ids in enumerate(completions)}

    def roll_out(texts, trainer):
        seen = {text: count() for text in texts}
        chosen = [int(text.removeprefix("w")) * GROUP_SIZE + next(seen[text]) for text in texts]
        return {
            "prompt_ids": [prompts[index // GROUP_SIZE].tolist() for index in chosen],
            "completion_ids": [completions[index].tolist() for index in chosen],
            "logprobs": [[0.0] * len(completions[index]) for index in chosen],
        }

    def reward(prompts, completions, completion_ids, **kwargs):
        return [float(rewards[order[tuple(ids)]]) for ids in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before_mb = peak_mb()
    meter = Meter()
    trainer = Measured(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": f"w{index}"} for index in range(len(prompts))]),
        rollout_func=roll_out,
        callbacks=[meter],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(completions) // rows,
            steps_per_generation=1,  # rows are padded to the longest that are prepared together: the fewer, the less
            num_generations=GROUP_SIZE,
            max_completion_length=256,
            max_steps=num_steps + 1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            beta=0.0,
            loss_type="grpo",
            scale_rewards="none",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    trainer.meter = meter
    trainer.train()
    torch.save(meter.gradient, folder / "trl.pt")
    num_tokens = sum(len(one) for one in completions) + GROUP_SIZE * sum(len(one) for one in prompts)
    print(
        json.dumps(
            {
                "tokens_per_cpu_s": num_tokens * num_steps / sum(meter.steps_s[1:]),
                "padding": 1.0 - trainer.num_tokens / trainer.num_cells,
                "micro_batches": len(completions) // rows,
                "peak_mb": peak_mb() - before_mb,
                "loss": trainer.state.log_history[0]["loss"],
            }
        )
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
