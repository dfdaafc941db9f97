"""TRL's side, run by the Python of its own environment: `python theirs.py FOLDER NUM_STEPS ROWS` prints a line of JSON.

An unchanged GRPOTrainer gets the records through `rollout_func` and a reward function; ROWS sequences go through it at
once. CPU time is that of its steps without the preparation of batches: forward, loss, gradient, optimiser.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# pyright: basic, reportMissingImports=false


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


class Replay:
    """The records in the place of a sampling model: the answers to each prompt and their rewards."""

    def __init__(self, folder: Path) -> None:
        self.prompts, self.completions, self.rewards = read_records(folder)
        self._order = {tuple(ids.tolist()): index for index, ids in enumerate(self.completions)}

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(len(one) for one in self.completions) + GROUP_SIZE * sum(len(one) for one in self.prompts)

    def dataset(self) -> Dataset:
        """Return each prompt as the word by which `roll_out` finds it."""
        return Dataset.from_list([{"prompt": f"w{index}"} for index in range(len(self.prompts))])

    def roll_out(self, texts, trainer):
        seen = {text: count() for text in texts}
        chosen = [int(text.removeprefix("w")) * GROUP_SIZE + next(seen[text]) for text in texts]
        return {
            "prompt_ids": [self.prompts[index // GROUP_SIZE].tolist() for index in chosen],
            "completion_ids": [self.completions[index].tolist() for index in chosen],
            "logprobs": [[0.0] * len(self.completions[index]) for index in chosen],
        }

    def reward(self, prompts, completions, completion_ids, **kwargs):
        return [float(self.rewards[self._order[tuple(ids)]]) for ids in completion_ids]


def config_of(folder: Path, replay: Replay, num_steps: int, rows: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(replay.completions) // rows,
        steps_per_generation=1,  # rows are padded to the longest prepared together, so few at a time are best
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
    )


def train(folder: Path, model: PreTrainedModel, replay: Replay, num_steps: int, rows: int) -> Measured:
    meter = Meter()
    trainer = Measured(
        model=model,
        reward_funcs=replay.reward,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=replay.dataset(),
        rollout_func=replay.roll_out,
        callbacks=[meter],
        args=config_of(folder, replay, num_steps, rows),
    )
    trainer.meter = meter
    trainer.train()
    return trainer


def main(folder: Path, num_steps: int, rows: int) -> None:
    torch.set_num_threads(1)
    replay = Replay(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before_mb = peak_mb()
    trainer = train(folder, model, replay, num_steps, rows)
    torch.save(trainer.meter.gradient, folder / "trl.pt")
    found = {
        "tokens_per_cpu_s": replay.num_tokens * num_steps / sum(trainer.meter.steps_s[1:]),
        "padding": 1.0 - trainer.num_tokens / trainer.num_cells,
        "micro_batches": len(replay.completions) // rows,
        "peak_mb": peak_mb() - before_mb,
        "loss": trainer.state.log_history[0]["loss"],
    }
    print(json.dumps(found))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
