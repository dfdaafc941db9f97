"""A fine-tuning from its config to the model that it leaves:

1. a step's loss is the mean negative log-probability of the answers' tokens, also when it is split; 2. it learns, and
leaves model, picture, metrics and summary; 3. resumed, it makes the same steps bit for bit, also after a kill while it
left its model; 4. with adapters the exported model has them merged in; 5. it ends when the loss is flat; 6. a signal
ends it after the step under way, with a checkpoint, and changes nothing after the last step; 7. faults are one line,
and nothing is left behind; `--dry-run` starts nothing; 8. a run folder has
one writer; 9. two ranks learn the same, interrupted and resumed, and write to the log alone (slow); 10. saves beside
its steps are those between them.
"""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_agent.cluster.local import locked
from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.observe.metrics import evaluation_rows, read_metrics, step_rows
from areal_agent.observe.progress import Progress
from areal_agent.sft.config import FlatConfig, SftConfig
from areal_agent.sft.data import load_data
from areal_agent.sft.fitting import Fitting, loaded
from areal_agent.sft.run import SftRun, fine_tune
from areal_agent.tokens.renderer import Renderer
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.worker import Worker
from areal_agent.types import JsonObject
from tests.commands import run
from tests.trainer.lab import held_by

LEARNING_RATE = 3e-3
Choose = Callable[..., SftConfig]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions of which each answer is one of four."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    asked = ({"role": "user", "content": f"What is {n}?"} for n in range(40))
    rows = [[one, {"role": "assistant", "content": f"The answer is {n % 4}."}] for n, one in enumerate(asked)]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return path


def config(folder: Path, chats: Path, run_dir: Path, **values: Any) -> SftConfig:
    trainer = {"learning_rate": LEARNING_RATE, "checkpoint_every": 2, "keep_last": 9, **values.pop("trainer", {})}
    given = {"model": str(folder), "data": str(chats), "run_dir": str(run_dir), "batch_size": 8, "epochs": 2}
    return SftConfig.parse(
        {**given, "held_out": {"every": 4}, "observe": {"progress": "none"}, "trainer": trainer, **values}
    )


@pytest.fixture
def choose(small_model: Path, chats: Path, tmp_path: Path) -> Choose:
    """A config of a run in a folder of its own, with these values changed."""
    return partial(config, small_model, chats, tmp_path / "run")


def setup(model: Path, folder: Path, **trainer: Any) -> TrainerSetup:
    values = TrainerConfig.model_validate({"learning_rate": LEARNING_RATE, **trainer})
    return TrainerSetup(model=model, trainer=values, seed=0, shared_memory=folder, publishes=False)


@pytest.mark.parametrize("budget", [8192, 40])
def test_the_loss_is_the_mean_over_the_answers_tokens(
    small_model: Path, chats: Path, tmp_path: Path, budget: int
) -> None:
    data = load_data(config(small_model, chats, tmp_path), small_model, 512)
    batch = next(data.batches(6, seed=0))
    model = AutoModelForCausalLM.from_pretrained(small_model)
    expected: list[torch.Tensor] = []
    for record in batch:
        ids, mask = torch.from_numpy(record.token_ids).long(), torch.from_numpy(record.loss_mask)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        expected.append(logprobs[mask[1:]].detach())
    with loaded(setup(small_model, tmp_path, tokens_per_micro_batch=budget), tmp_path) as trainer:
        measured = trainer.call("measure", {}, batch)["logprobs"]
        metrics = trainer.call("fit", {"step": 1, "rate": 0.5}, batch)["metrics"]
    for ours, theirs in zip(measured, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=1e-4)
    assert metrics["loss"] == pytest.approx(-float(torch.cat(expected).mean()), rel=1e-4)
    assert metrics["num_loss_tokens"] == sum(map(len, expected))
    assert metrics["learning_rate"] == LEARNING_RATE / 2


@pytest.fixture(scope="module")
def done(small_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run: ten steps of eight rows."""
    folder = tmp_path_factory.mktemp("done") / "run"
    assert fine_tune(config(small_model, chats, folder), name="sft") == 0
    return folder


def test_it_learns_and_leaves_a_model(done: Path, small_model: Path) -> None:
    rows = read_metrics(done / "metrics.jsonl")
    losses = [row["sft/held_out_loss"] for row in evaluation_rows(rows)]
    assert [row["step"] for row in evaluation_rows(rows)] == [0, 4, 8, 10]
    assert losses == sorted(losses, reverse=True)
    summary = json.loads((done / "summary.json").read_bytes())
    assert (summary["status"], summary["steps"]) == ("completed", 10)
    assert (summary["held_out_loss_before"], summary["held_out_loss_after"]) == (losses[0], losses[-1])
    assert summary["trained_tokens"] == sum(row["sft/num_loss_tokens"] for row in step_rows(rows))
    assert (done / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (done / "model" / "tokenizer.json").read_bytes() == (small_model / "tokenizer.json").read_bytes()
    assert not (done / "model" / "training").exists()
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (done / "model", small_model))
    assert ours.keys() == theirs.keys()
    AutoModelForCausalLM.from_pretrained(done / "model")


def test_saves_beside_its_steps_are_those_between_them(choose: Choose, done: Path, tmp_path: Path) -> None:
    assert fine_tune(choose(trainer={"async_save": True}), name="sft") == 0
    between, beside = (
        {path.name: held_by(path) for path in (folder / "checkpoints").iterdir()} for folder in (done, tmp_path / "run")
    )
    assert between == beside


@pytest.mark.parametrize("missing", [("model", "checkpoints/step_000010", "checkpoints/step_000008"), ()])
def test_a_resume_makes_the_same_steps(done: Path, tmp_path: Path, missing: Sequence[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    for name in ("summary.json", *missing):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    resumed = SftConfig.load(folder / "config.yaml")
    assert fine_tune(resumed, name="sft", resume=str(folder)) == 0
    weights = [(one / "model" / "model.safetensors").read_bytes() for one in (done, folder)]
    assert weights[0] == weights[1]
    told = [
        [
            {k: v for k, v in row.items() if k not in ("time", "sft/seconds", "sft/tokens_per_s")}
            for row in read_metrics(one)
        ]
        for one in (done / "metrics.jsonl", folder / "metrics.jsonl")
    ]
    assert told[0] == told[1]
    with pytest.raises(ConfigError, match="it is completed, and its model is"):
        fine_tune(resumed, name="sft", resume=str(folder))


def test_more_epochs_may_be_asked_for_at_a_resume() -> None:
    """Unless the loss was flat: then the decay that has begun is the end."""
    flat = FlatConfig(decay_steps=4)

    def fitting(num_steps: int, state: JsonObject | None = None) -> Fitting:
        return Fitting(Worker(), iter([]), [], num_steps=num_steps, every=1, flat=flat, step=3, state=state)

    begun = fitting(10)
    assert fitting(40, begun.state).num_steps == 40
    begun.wind_down()
    assert fitting(40, begun.state).num_steps == 3 + 4


class Interrupted(Progress):
    """A progress at which somebody presses Ctrl-C, once a step is done."""

    step_to_come = 0

    def phase_progress(self, fraction: float, text: str = "") -> None:
        if text.startswith(f"step {self.step_to_come}/"):
            signal.raise_signal(signal.SIGINT)


def interrupt(chosen: SftConfig, step: int) -> tuple[int, str]:
    """Return how a run ends that is interrupted in a step."""
    assert chosen.run_dir is not None
    folder, progress = RunFolder(Path(chosen.run_dir)), Interrupted(0, mode="none")
    progress.step_to_come = step
    folder.make()
    return SftRun(chosen, folder, progress).run()


def test_an_interruption_is_after_the_step_under_way(choose: Choose, done: Path, tmp_path: Path) -> None:
    chosen, before = choose(), signal.getsignal(signal.SIGINT)
    code, words = interrupt(chosen, step=3)
    assert signal.getsignal(signal.SIGINT) is before
    hint = f"interrupted after step 3; go on with: python -m areal_agent.sft --resume {tmp_path / 'run'}"
    assert (code, words) == (130, hint)
    assert fine_tune(chosen, name="sft", resume=str(tmp_path / "run")) == 0
    weights = [(one / "model" / "model.safetensors").read_bytes() for one in (done, tmp_path / "run")]
    assert weights[0] == weights[1]


def test_an_interruption_in_the_last_step_changes_nothing(choose: Choose, tmp_path: Path) -> None:
    code, words = interrupt(choose(epochs=0.5), step=3)
    assert (code, words.splitlines()[0].split(" in ")[0]) == (0, "3 steps")
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_a_loss_that_is_no_number_is_told(choose: Choose, tmp_path: Path) -> None:
    chosen = choose(trainer={"learning_rate": 1e18}, epochs=0.5)
    assert fine_tune(chosen, name="sft") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["held_out_loss_after"] is None


def test_a_folder_has_one_writer(choose: Choose, tmp_path: Path) -> None:
    chosen, folder = choose(), RunFolder(tmp_path / "run")
    folder.make()
    with locked(folder.path), pytest.raises(ConfigError, match="another process is at work there"):
        fine_tune(chosen, name="sft", resume=str(folder.path))
    assert folder.checkpoints.is_dir()


def test_adapters_are_merged_into_the_model(choose: Choose, small_model: Path, tmp_path: Path) -> None:
    trainer = {"lora": {"rank": 2, "target_modules": ["q_proj"]}, "checkpoint_every": 100}
    assert fine_tune(choose(trainer=trainer, epochs=0.5), name="sft") == 0
    ours, theirs = (load_file(one / "model.safetensors") for one in (tmp_path / "run" / "model", small_model))
    changed = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert changed == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)}
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_config.json").is_file()


def test_a_chat_template_of_ones_own_is_learnt_and_saved(choose: Choose, small_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{- 'Be brief. ' -}}" + Renderer.load(small_model).chat_template)
    chosen = choose(chat_template=str(own), epochs=0.25)
    assert load_data(chosen, small_model, 512).rows != load_data(choose(), small_model, 512).rows
    assert fine_tune(chosen, name="sft") == 0
    assert Renderer.load(tmp_path / "run" / "model").chat_template == own.read_text()


def test_it_ends_when_the_loss_is_flat(small_model: Path, chats: Path, tmp_path: Path) -> None:
    """Evaluations after steps 2, 4 and 6: the first is the best, two are no better, and four steps of decay follow."""
    data = load_data(config(small_model, chats, tmp_path), small_model, 512)
    flat = FlatConfig(checks=2, decay_steps=4)
    held_out = [record for row in data.held_out for record in row.records()]
    with loaded(setup(small_model, tmp_path, learning_rate=1e-12), tmp_path) as trainer:
        fitting = Fitting(trainer, data.batches(2, seed=0), held_out, num_steps=40, every=2, flat=flat)
        rates = [fitted.metrics["learning_rate"] / 1e-12 for fitted in fitting.steps()]
    assert rates == pytest.approx([1.0] * 6 + [1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "none"}, "model 'none': there is no such folder"),
        ({"chat_template": "none.jinja"}, "chat_template is 'none.jinja', and cannot be read"),
        ({"batch_sizes": 3}, r"unknown key 'batch_sizes'; did you mean 'batch_size'\?"),
        ({"data": None}, "data"),
        ({"data": {"max_tokens": 9}}, "names no chats; set data to a JSONL file"),
        ({"data": {"from_run": "x"}}, "from_run and min_reward belong together"),
        ({"held_out": {"file": "x", "share": 0.1}}, "share has no effect beside file"),
        ({"trainer": {"transfer": "disk"}}, "trainer.transfer has no effect here"),
        ({"trainer": {"lora": {"push": "adapter"}}}, r"trainer.lora.push has no effect here"),
        ({"held_out": {"share": 0, "every": 3}}, "every has no effect with share 0"),
        ({"observe": {"token_records": 0.5}}, "observe.token_records has no effect here"),
        ({"until_flat": {}, "held_out": {"share": 0}}, "until_flat needs chats to measure on"),
        ({"until_flat": {}, "trainer": {"schedule": "linear"}}, "trainer.schedule is 'linear', and until_flat has"),
        ({"until_flat": {}}, "until_flat.decay_steps is 50, and there are only 10 steps"),
    ],
)
def test_faults_are_one_line_and_leave_nothing(
    choose: Choose, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fine_tune(choose(**values), name="sft")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_reads_every_row_and_starts_nothing(
    choose: Choose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fine_tune(choose(), name="sft", is_dry=True) == 0
    told = capsys.readouterr().out
    assert "for 10 steps in" in told
    assert "38 rows to learn in 38 sequences" in told
    assert "2 rows held out" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(choose: Choose, done: Path, tmp_path: Path) -> None:
    two = choose(trainer={"num_ranks": 2})
    assert interrupt(two, step=3)[0] == 130
    (tmp_path / "run" / "config.yaml").write_text(two.to_yaml())
    ended = run("areal_agent.sft", "--resume", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert "rank 1" not in ended.stdout + ended.stderr
    assert "rank 1: loaded" in (tmp_path / "run" / "logs" / "trainer-rank-1.log").read_text()
    ours, theirs = (load_file(one / "model" / "model.safetensors") for one in (tmp_path / "run", done))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=0.01 * LEARNING_RATE, rtol=0.0)
