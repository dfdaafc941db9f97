"""TRL's side of `learning`, run by the Python of its own environment: reads settings in JSON, prints a line of it.

An unchanged GRPOTrainer trains float32 weights, with autocast where the dtype is bfloat16. Answering held-out tasks is
in no step's time.
"""

import json
import resource
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workflow import score

# pyright: basic, reportMissingImports=false


class Meter(TrainerCallback):
    """Keeps the seconds of each step, and how many held-out tasks succeed after some of them."""

    def __init__(self, given, tokenizer):
        self.given, self.tokenizer = given, tokenizer
        self.steps_s, self.points = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started_s = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps_s.append(time.perf_counter() - self.started_s)
        if state.global_step % self.given["eval_every"] == 0 or state.global_step == self.given["steps"]:
            self.evaluate(state.global_step, model)

    @torch.no_grad()
    def evaluate(self, step, model):
        tasks = self.given["held_out"]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        asked = [one["messages"] for one in tasks]
        batch = self.tokenizer.apply_chat_template(asked, **options).to(model.device)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=self.given["max_tokens"])
        said = self.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [score(text, one["answer"]) for text, one in zip(said, tasks, strict=True)]
        self.points.append((step, sum(self.steps_s), sum(scores) / len(scores)))


def reward(completions, answer, **kwargs):
    return [score(one[0]["content"], right) for one, right in zip(completions, answer, strict=True)]


def main(given):
    tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
    meter = Meter(given, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=given["device"] == "cpu",
            bf16=given["dtype"] == "bfloat16",
            per_device_train_batch_size=given["batch_size"] * given["group_size"],
            num_generations=given["group_size"],
            max_completion_length=given["max_tokens"],
            max_steps=given["steps"],
            seed=given["seed"],
            learning_rate=given["learning_rate"],
            **{"lr_scheduler_type": "constant", "adam_beta2": 0.95, "adam_epsilon": 1e-5},  # as areal_agent's
            **{"gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
            reward_funcs=reward,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(
                [{"prompt": one["messages"], "answer": one["answer"]} for one in given["tasks"]]
            ),
            callbacks=[meter],
            args=config,
        )
        meter.evaluate(0, trainer.model)
        trainer.train()
    peaks = {"trl": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    print("\n" + json.dumps({"steps_s": meter.steps_s, "points": meter.points, "peak_bytes": peaks}))


if __name__ == "__main__":
    main(json.load(sys.stdin))
