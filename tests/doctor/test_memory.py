"""The memory estimate, against numbers worked out by hand and against a process that was measured.

- Parameters of published models, and bytes of a token's keys and values.
- The trainer's parts on one GPU; with several ranks each has its share, also while it loads, and what is gathered;
  with replicas each has its share of one, and all have copies of a checkpoint that is written beside training.
- Activations with and without gradient checkpointing; the longest context counts where it may go alone.
- A reference, a critic and a teacher are counted, the first two also in the checkpoint; adapters count what is
  trained, and no reference.
- An engine's keys and values: what was asked for, what its share leaves, what the embedded engine takes by itself; one
  that lends them has them while the trainer does not train.
- Servers with shards stand on their GPUs, several embedded engines each on one; one that runs already takes nothing.
- A cluster holds the ranks on its first machines, then each server whole; every kind of machine is reported once, and
  what finds no room with a remedy.
- New weights take as many copies as are on their way at once.
- A config that does not fit is reported with what suffices, alone or together; so is any missing GPU.
- The configs for GPUs are valid, fit by this estimate, and have their tasks and workflows.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.doctor import memory as estimates
from areal_agent.doctor.findings import GIB, State
from areal_agent.doctor.machines import Machine, shares_of
from areal_agent.doctor.memory import CUDA_CONTEXT_BYTES, SERVER_BYTES, TrainerMemory, estimate, memory_findings
from areal_agent.doctor.model import ModelShape, shape_of
from areal_agent.doctor.settings import _checkpoints, storage_findings
from areal_agent.models.recipe import RECIPE
from areal_agent.rollout.tasks import load_tasks, require_json
from areal_agent.rollout.workflow import load_workflow
from areal_agent.run.preflight import load_eval_tasks
from tests.commands import run
from tests.doctor.shapes import QWEN3_06B, QWEN3_4B, QWEN3_17B, SHAPES, distilled

ONE_GPU = Machine(memory_bytes=128 * GIB, num_gpus=1, gpu_bytes=80 * GIB)
EIGHT_GPUS = Machine(memory_bytes=512 * GIB, num_gpus=8, gpu_bytes=80 * GIB)
NO_GPU = Machine(memory_bytes=16 * GIB)
CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = 596_049_920  # of Qwen3-0.6B


def config(**values: object) -> Config:
    return Config.parse({"tasks": "tasks:load", "workflow": "flow:solve", **values})


def sglang(*server_args: str, **values: object) -> dict[str, object]:
    return {"backend": "sglang", "python": "python", "server_args": server_args, **values}


def parts_of(config: Config, machine: Machine, gpu: int | None, shape: ModelShape = QWEN3_06B) -> dict[str, int]:
    return estimate(shape, config, machine)[gpu]


@pytest.mark.parametrize(
    ("shape", "num_parameters", "kv_bytes"),
    [
        # V H + L (2 H Q D + 2 H K D + 3 H I + 2 H + 2 D) + H, and 2 L K D elements of two bytes
        (QWEN3_06B, 151_936 * 1024 + 28 * 15_730_944 + 1024, 114_688),
        (QWEN3_17B, 151_936 * 2048 + 28 * 50_336_000 + 2048, 114_688),
        (QWEN3_4B, 151_936 * 2560 + 36 * 100_930_816 + 2560, 147_456),
    ],
)
def test_parameters_and_keys_of_published_models(shape: ModelShape, num_parameters: int, kv_bytes: int) -> None:
    assert (shape.num_parameters, shape.kv_bytes(2)) == (num_parameters, kv_bytes)


def test_the_parameters_are_those_of_the_model(small_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_model)
    assert ModelShape.read(small_model).num_parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_parameters_of_experts_count(model_type: str) -> None:
    from tests.trainer.families import PACKED, make

    model = make(model_type, PACKED[model_type])
    found = ModelShape.of(model.config.to_dict())
    assert found.num_parameters == sum(one.numel() for one in model.parameters())
    assert found.num_experts == 4


def test_a_trainer_on_one_gpu() -> None:
    found = parts_of(config(engine={"max_context_tokens": 4096}), ONE_GPU, 0)
    assert QWEN3_06B.num_parameters == PARAMETERS
    assert {what: size for what, size in found.items() if what.startswith("trainer")} == {
        "trainer: weights": 4 * PARAMETERS,
        "trainer: Adam's moments": 8 * PARAMETERS,
        "trainer: gradients": 4 * PARAMETERS,
        "trainer: copies in bfloat16": 2 * PARAMETERS,
        "trainer: activations": 8192 * 29 * 75_776,  # 16 H + 12 Q D + 10 K D + 8 I bytes of a token and layer
        "trainer: logits": 2 * 2**27 + 8 * 2**23,
        "trainer: output layer's gradient": 8 * 151_936 * 1024,
        "trainer: CUDA": CUDA_CONTEXT_BYTES,
    }


def test_the_sizes_of_chunks_and_blocks_are_those_of_the_loss() -> None:
    from areal_agent.algorithms import batching

    names = ("CHUNK_BYTES", "BLOCK_ON_CPU", "BLOCK_ON_GPU")
    assert [getattr(estimates, one) for one in names] == [getattr(batching, one) for one in names]


def test_the_dtype_decides_what_is_gathered_and_kept() -> None:
    exact_head = parts_of(config(trainer={"fp32_lm_head": True}), ONE_GPU, 0)
    assert exact_head["trainer: copies in bfloat16"] == 2 * 28 * 15_730_944
    float32 = parts_of(config(trainer={"dtype": "float32"}), ONE_GPU, 0)
    assert "trainer: copies in bfloat16" not in float32
    assert float32["trainer: activations"] == 8192 * 29 * 131_072  # 24 H + 20 Q D + 16 K D + 16 I
    assert float32["trainer: output layer's gradient"] == 4 * 151_936 * 1024


def test_checkpointing_keeps_the_input_of_each_layer() -> None:
    found = parts_of(config(trainer={"gradient_checkpointing": True}), ONE_GPU, 0)
    assert found["trainer: activations"] == 8192 * (28 * 2 * 1024 + 2 * 75_776)


@pytest.mark.parametrize(("oversized", "num_tokens"), [("alone", 20_000), ("refuse", 32_768)])
def test_the_longest_context_counts_where_it_may_go_alone(oversized: str, num_tokens: int) -> None:
    budget = 32_768 if oversized == "refuse" else 1000
    asked = config(
        trainer={"oversized": oversized, "tokens_per_micro_batch": budget}, engine={"max_context_tokens": 20_000}
    )
    assert TrainerMemory(shape=QWEN3_06B, config=asked, is_gpu=True).tokens == num_tokens


def test_ranks_share_what_is_by_parameter_and_gather_the_rest() -> None:
    asked = config(trainer={"num_ranks": 4, "gradient_checkpointing": True}, engine=sglang("--base-gpu-id", "4"))
    found = parts_of(asked, EIGHT_GPUS, 3, QWEN3_4B)
    assert found["trainer: weights"] == 4_022_468_096
    assert found["trainer: Adam's moments"] == 2 * 4_022_468_096
    assert found["trainer: gathered layers"] == 2 * (151_936 * 2560 + 2 * 100_930_816)
    memory = TrainerMemory(shape=QWEN3_4B, config=asked, is_gpu=True)
    rest = 151_936 * 2560 + 2560  # the embedding, which is the output layer too, and the last norm
    assert memory.loading().total() == 4_022_468_096 + 4 * (rest + 100_930_816) + CUDA_CONTEXT_BYTES


def test_a_replica_is_shared_by_its_own_ranks_and_copied_with_its_save() -> None:
    asked = config(trainer={"num_ranks": 4, "replicas": 2, "async_save": True}, engine=sglang("--base-gpu-id", "4"))
    assert parts_of(asked, EIGHT_GPUS, 3, QWEN3_4B)["trainer: weights"] == 2 * 4_022_468_096
    memory = TrainerMemory(shape=QWEN3_4B, config=asked, is_gpu=True)
    assert memory.saving(4, None)["trainer: a checkpoint being written"] == 2 * memory.checkpoint_bytes


@pytest.mark.parametrize(
    ("chosen", "device", "memory_bytes", "is_beside"),
    [
        ("auto", "cuda", 64 * GIB, True),
        ("auto", "cuda", 8 * GIB, False),  # the copies take 6.7 GiB
        ("auto", "cpu", 64 * GIB, False),
        (True, "cpu", 8 * GIB, True),
        (False, "cuda", 64 * GIB, False),
    ],
)
def test_copies_for_a_save_beside_training_are_counted_and_told(chosen, device, memory_bytes, is_beside) -> None:
    asked = config(trainer={"async_save": chosen, "device": device})
    machine = replace(ONE_GPU, memory_bytes=memory_bytes, disk_bytes=2**40, is_elsewhere=True)
    assert ("trainer: a checkpoint being written" in parts_of(asked, machine, None)) is is_beside
    memory = TrainerMemory(shape=QWEN3_06B, config=asked, is_gpu=device == "cuda")
    told = "goes on" if is_beside else "waits"
    assert f"training {told} while one is written" in _checkpoints(memory, asked, machine).found


def test_small_weights_in_the_memory_of_a_shared_gpu_are_there_thrice() -> None:
    small = replace(QWEN3_06B, num_layers=2)
    found, of_large = (parts_of(config(), ONE_GPU, 0, shape) for shape in (small, QWEN3_06B))
    slots, copy = found["trainer: new weights for the engine"], found["engine: new weights before they serve"]
    assert (slots, copy) == (4 * small.num_parameters, 2 * small.num_parameters)
    by_disk = parts_of(config(trainer={"transfer": "disk"}), ONE_GPU, 0, small)
    assert all("trainer: new weights for the engine" not in one for one in (of_large, by_disk))


def test_a_reference_and_a_critic_are_counted() -> None:
    asked = config(algorithm={"preset": "ppo", "reference": "initial", "kl_coefficient": 0.1})
    found = parts_of(asked, ONE_GPU, 0)
    critic = PARAMETERS + 1024  # tied: nothing stands above the backbone but its own head
    assert found["trainer: reference"] == 4 * PARAMETERS
    assert found["trainer: critic with its moments"] == 12 * critic
    assert found["trainer: gradients"] == 4 * (PARAMETERS + critic)
    memory = TrainerMemory(shape=QWEN3_06B, config=asked, is_gpu=True)
    assert memory.checkpoint_bytes == 12 * PARAMETERS + 12 * critic + 4 * PARAMETERS


async def test_a_teacher_in_the_trainer_is_counted(small_model) -> None:
    algorithm = {"teacher": {"model": str(small_model)}}
    shape = await shape_of(config(model=str(small_model), algorithm=algorithm), small_model)
    found = parts_of(config(algorithm=algorithm), ONE_GPU, 0, replace(QWEN3_06B, num_teacher_parameters=2 * 10**9))
    assert found["trainer: teacher"] == 8 * 10**9
    assert shape.num_teacher_parameters == shape.num_parameters
    served = config(model=str(small_model), algorithm={"teacher": {"url": "http://127.0.0.1:1"}})
    assert (await shape_of(served, small_model)).num_teacher_parameters == 0


def test_adapters_take_the_memory_of_what_is_trained() -> None:
    lora = {"rank": 32, "target_modules": ["q_proj", "down_proj"]}
    asked = config(trainer={"lora": lora}, algorithm={"reference": "initial", "kl_coefficient": 0.1})
    found = parts_of(asked, ONE_GPU, 0)
    adapters = 28 * 32 * ((1024 + 2048) + (3072 + 1024))
    matrices = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert {what: size for what, size in found.items() if what.startswith("trainer")} == {
        "trainer: weights": 4 * (PARAMETERS - matrices) + 2 * matrices,
        "trainer: adapters": 4 * adapters,
        "trainer: Adam's moments": 8 * adapters,
        "trainer: gradients": 4 * adapters,
        "trainer: copies in bfloat16": 2 * (PARAMETERS - matrices + adapters),
        "trainer: activations": 8192 * 29 * (75_776 + 2 * 2 * 32),
        "trainer: logits": 2 * 2**27 + 8 * 2**23,
        "trainer: CUDA": CUDA_CONTEXT_BYTES,
    }
    memory = TrainerMemory(shape=QWEN3_06B, config=asked, is_gpu=True)
    assert memory.checkpoint_bytes == 4 * PARAMETERS + 16 * adapters


def test_the_keys_of_a_server_are_those_asked_for_or_what_its_share_leaves() -> None:
    asked = parts_of(config(engine=sglang(kv_tokens=32_768)), ONE_GPU, 0)
    assert asked["engine: weights"] == 2 * PARAMETERS
    assert asked["engine: keys and values"] == 32_768 * 114_688
    assert asked["engine: CUDA"] == SERVER_BYTES
    of_all = parts_of(config(engine=sglang("--gpu-memory-utilization=0.5")), ONE_GPU, 0)
    assert of_all["engine: keys and values"] == 40 * GIB - 2 * PARAMETERS - SERVER_BYTES
    share = parts_of(config(engine=sglang("--mem-fraction-static=0.5")), ONE_GPU, 0)
    assert share["engine: keys and values"] == 40 * GIB - 2 * PARAMETERS


def test_the_embedded_engine_takes_two_contexts_a_slot() -> None:
    fields = {"max_running_requests": 8, "max_context_tokens": 512, "dtype": "float32"}
    found = parts_of(config(engine=fields), NO_GPU, None)
    head = 151_936 * 1024
    assert found["engine: weights"] == 4 * (2 * PARAMETERS - 1024 + head)  # packed for products, but for the last norm
    assert found["engine: keys and values"] == 2 * 8 * 512 * 2 * 114_688  # in float32
    assert found["new weights in shared memory"] == 2 * 4 * PARAMETERS


def test_several_embedded_engines_take_each_the_same() -> None:
    small = {"max_running_requests": 4, "max_context_tokens": 512}
    one, three = (config(engine={**small, "num_servers": number}) for number in (1, 3))
    alone, together = parts_of(one, NO_GPU, None), parts_of(three, NO_GPU, None)
    of_engines = [what for what in alone if what.startswith("engine: ")]
    assert len(of_engines) == 5
    assert {what: together[what] for what in of_engines} == {what: 3 * alone[what] for what in of_engines}
    spread = config(engine={"num_servers": 2, "device": "cuda", "kv_tokens": 10_000}, trainer={"device": "cpu"})
    assert [*estimate(QWEN3_06B, spread, EIGHT_GPUS)] == [None, 0, 1]


def test_several_embedded_engines_divide_what_one_would_take_by_memory() -> None:
    long = {"max_running_requests": 4096, "max_context_tokens": 32_768}
    for machine, gpu in ((NO_GPU, None), (ONE_GPU, 0)):
        one, three = (
            parts_of(config(engine={**long, "num_servers": number}, trainer={"device": "cpu"}), machine, gpu)[
                "engine: keys and values"
            ]
            for number in (1, 3)
        )
        assert one - 3 * 2 * 114_688 * 2 < three <= one, "but for what is no whole token"


def test_keys_that_are_lent_are_not_there_while_the_trainer_trains() -> None:
    kept, lent = (
        {"engine": {"kv_tokens": 300_000, "release_kv": is_lent}, "trainer": {"transfer": "distributed"}}
        for is_lent in (False, True)
    )
    both, training = (parts_of(config(**values), ONE_GPU, 0) for values in (kept, lent))
    assert {"engine: keys and values", "trainer: activations"} < set(both)
    assert "trainer: activations" not in training  # the keys take more
    assert training["engine: keys and values"] == 300_000 * 114_688
    assert training["trainer: new weights for the engine"] == 2 * PARAMETERS


def test_shards_stand_on_gpus_of_their_own() -> None:
    asked = config(engine=sglang("--tp-size", "2", "--base-gpu-id", "4", device="cuda"), trainer={"device": "cpu"})
    needs = estimate(QWEN3_4B, asked, EIGHT_GPUS)
    assert set(needs) == {None, 4, 5}
    assert needs[4]["engine: weights"] == 4_022_468_096  # half of 2 P


def test_servers_that_run_already_are_not_counted() -> None:
    asked = config(engine={"urls": ["http://127.0.0.1:1"]}, trainer={"device": "cpu"})
    assert [*estimate(QWEN3_06B, asked, ONE_GPU)] == [None]
    assert not [what for what in parts_of(asked, ONE_GPU, None) if what.startswith("engine")]


def on_ray(num_ranks: int, num_servers: int) -> Config:
    trainer, engine = {"device": "cuda", "num_ranks": num_ranks}, {"device": "cuda", "num_servers": num_servers}
    return config(cluster={"kind": "ray"}, trainer=trainer, engine=engine, rollout={"workers": 4})


async def test_a_cluster_holds_ranks_then_servers() -> None:
    cluster = replace(EIGHT_GPUS, num_nodes=3)
    shares = shares_of(on_ray(10, 7), cluster)
    assert [(one.num_ranks, len(one.servers), one.num_workers, one.has_main) for one in shares] == [
        (8, 0, 2, True),
        (2, 6, 1, False),
        (0, 1, 1, False),
    ]
    findings = await memory_findings(QWEN3_06B, on_ray(10, 7), cluster)
    assert [(one.check, one.state) for one in findings] == [
        (check, State.OK)
        for check in ("placement", "memory", "GPU 0-7", "memory", "GPU 0-1", "GPU 2-7", "memory", "GPU 0")
    ]
    told = "trainer ranks: 10 on machines 0, 1; engines: 7 of 1 GPU on machines 1, 2; GPUs left over: 7"
    assert findings[0].found == told
    assert findings[-1].found.startswith("machine 2: about ")


async def test_machines_of_one_kind_are_one_finding() -> None:
    findings = await memory_findings(QWEN3_06B, on_ray(8, 24), replace(EIGHT_GPUS, num_nodes=4))
    assert [one.found.partition(":")[0] for one in findings[1:]] == ["machine 0"] * 2 + ["machines 1, 2, 3"] * 2


@pytest.mark.parametrize(
    ("asked", "found", "change"),
    [
        (on_ray(8, 10), "no room for 2 of 10 engines", "or take 3 machines"),
        (on_ray(20, 1), "no room for 4 of 20 trainer ranks, 1 of 1 engines", "or take 3 machines"),
        (config(), "cluster.kind is local, which uses one machine of 2", "set cluster.kind=ray"),
    ],
    ids=["engines", "ranks", "local"],
)
async def test_what_finds_no_room_is_told_with_a_remedy(asked: Config, found: str, change: str) -> None:
    [placement, *_] = await memory_findings(QWEN3_06B, asked, replace(EIGHT_GPUS, num_nodes=2))
    assert (placement.check, placement.state, placement.found) == ("placement", State.FAIL, found)
    assert change in placement.change


@pytest.mark.parametrize(
    ("values", "copies"),
    [
        ({}, 2),
        ({"engine": sglang()}, 4),
        ({"tasks": None, "workflow": None, "rollout": {"gateway_url": "http://g"}, "engine": {"url": "http://e"}}, 4),
        ({"trainer": {"transfer": "disk"}}, 3),
    ],
    ids=["embedded", "sglang", "online", "disk"],
)
async def test_copies_of_weights_on_their_way(values: dict[str, object], copies: int) -> None:
    [_, transfer] = await storage_findings(QWEN3_06B, config(**values), NO_GPU)
    assert f": {copies} copies of 2.2 GiB" in transfer.found


@pytest.mark.slow
def test_a_trainer_process_takes_about_as_much_as_estimated(tmp_path: Path) -> None:
    """Weights, optimiser and the activations of a full micro-batch, of a model in the form of the tiny one."""
    done = run("tests.doctor.train_once", str(tmp_path))
    assert done.returncode == 0, done.stderr
    shape = ModelShape.of_recipe(RECIPE)
    memory = TrainerMemory(shape=shape, config=config(engine={"max_context_tokens": 512}), is_gpu=False)
    estimated = memory.at_peak().total()
    assert estimated / 2 < int(done.stdout) < 2 * estimated


@pytest.mark.parametrize(
    ("values", "machine", "remedy"),
    [
        ({"trainer": {"tokens_per_micro_batch": 40_000}}, ONE_GPU, "gradient_checkpointing"),
        (
            {"trainer": {"tokens_per_micro_batch": 500_000, "gradient_checkpointing": True}},
            ONE_GPU,
            "tokens_per_micro_batch",
        ),
        ({"engine": {"kv_tokens": 10**6}, "trainer": {"device": "cpu"}}, ONE_GPU, "engine.kv_tokens"),
        ({"trainer": {"num_ranks": 2}}, ONE_GPU, "lower trainer.num_ranks"),
        ({}, Machine(memory_bytes=GIB), "use a smaller model"),
    ],
)
async def test_what_does_not_fit_is_told_with_a_remedy(
    values: dict[str, object], machine: Machine, remedy: str
) -> None:
    findings = await memory_findings(QWEN3_06B, config(**values), machine)
    failed = [finding for finding in findings if finding.state is State.FAIL]
    assert failed and all(remedy in finding.change for finding in failed)


@pytest.mark.parametrize(
    ("name", "overrides", "shape", "num_gpus", "gib", "change"),
    [
        ("qwen3_4b_8gpu", ["trainer.num_ranks=1"], QWEN3_4B, 1, 24, "set trainer.lora={} (adapters, docs/lora.md)"),
        ("qwen3_4b_8gpu", [], QWEN3_4B, 1, 24, "set trainer.lora={} (adapters, docs/lora.md)"),
        ("qwen3_4b_8gpu", ["trainer.num_ranks=1"], QWEN3_4B, 8, 72, "set trainer.num_ranks=2, or trainer.lora"),
        ("qwen3_4b_1gpu_lora", [], QWEN3_4B, 1, 36, "set engine.kv_tokens=32768, or trainer.tokens_per_micro_batch="),
        ("qwen3_4b_1gpu_lora", [], QWEN3_4B, 1, 24, "use a smaller model, or GPUs with more memory"),
        ("qwen3_1.7b_1gpu", ["trainer.gradient_checkpointing=false"], QWEN3_17B, 1, 24,
         "set trainer.gradient_checkpointing=true trainer.lora="),
    ],
)  # fmt: skip
async def test_only_what_suffices_is_advised(
    name: str, overrides: list[str], shape: ModelShape, num_gpus: int, gib: int, change: str
) -> None:
    machine = Machine(memory_bytes=256 * GIB, num_gpus=num_gpus, gpu_bytes=gib * GIB)
    findings = await memory_findings(shape, Config.load(CONFIGS / f"{name}.yaml", overrides), machine)
    assert {finding.check: finding for finding in findings}["GPU 0"].change.startswith(change)


async def test_missing_gpus_of_servers_are_listed() -> None:
    machine = Machine(memory_bytes=256 * GIB, num_gpus=4, gpu_bytes=80 * GIB)
    findings = await memory_findings(QWEN3_4B, Config.load(CONFIGS / "qwen3_4b_8gpu.yaml"), machine)
    missing = [finding for finding in findings if finding.state is State.FAIL]
    assert [finding.check for finding in missing] == ["GPU 4-7"]
    assert all(finding.change.startswith("lower engine.num_servers") for finding in missing)


@pytest.mark.parametrize(
    ("name", "shape", "num_gpus", "gib"),
    [
        ("qwen3_0.6b_1gpu", QWEN3_06B, 1, 24),
        ("qwen3_1.7b_1gpu", QWEN3_17B, 1, 80),
        ("qwen3_4b_1gpu_lora", QWEN3_4B, 1, 80),
        ("qwen3_0.6b_1gpu_vllm", QWEN3_06B, 1, 24),
        ("qwen3_4b_8gpu", QWEN3_4B, 8, 80),
        ("qwen3_4b_8gpu_vllm", QWEN3_4B, 8, 80),
        ("qwen3_8b_1node", SHAPES["Qwen3-8B"], 8, 80),
    ],
)
async def test_it_fits(name: str, shape: ModelShape, num_gpus: int, gib: int) -> None:
    config = Config.load(CONFIGS / f"{name}.yaml")
    machine = Machine(memory_bytes=256 * GIB, num_gpus=num_gpus, gpu_bytes=gib * GIB)
    findings = await memory_findings(shape, config, machine)
    assert [finding.check for finding in findings] == [
        "memory",
        *(["GPU 0"] if num_gpus == 1 else ["GPU 0-3", "GPU 4-7"]),
    ]
    assert [finding for finding in findings if finding.state is not State.OK] == []


async def test_it_fits_four_machines() -> None:
    cluster = replace(EIGHT_GPUS, num_nodes=4)
    findings = await memory_findings(SHAPES["Qwen3-32B"], Config.load(CONFIGS / "qwen3_32b_4nodes.yaml"), cluster)
    assert [one.state for one in findings] == [State.OK] * 7
    assert findings[0].found.startswith("trainer ranks: 16 on machines 0, 1; engines: 4 of 4 GPUs on machines 2, 3;")


@pytest.mark.parametrize(
    ("size", "shape", "num_nodes"),
    [
        ("1.5b", distilled(1536, 8960, 28, 12, 2), 16),
        ("7b", distilled(3584, 18_944, 28, 28, 4), 24),
        ("14b", distilled(5120, 13_824, 48, 40, 8), 32),
        ("32b", distilled(5120, 27_648, 64, 40, 8), 48),
    ],
)
async def test_the_papers_runs_fit_its_machines(size: str, shape: ModelShape, num_nodes: int) -> None:
    config = Config.load(CONFIGS / f"paper_{size}.yaml")
    answers = (config.batch_size, config.group_size, config.rollout.max_tokens, config.algorithm.minibatches)
    assert (*answers, config.trainer.learning_rate) == (512, 16, 27_648, 4, 2e-5)  # Table 3
    findings = await memory_findings(shape, config, replace(EIGHT_GPUS, num_nodes=num_nodes))
    assert {one.state for one in findings} == {State.OK}
    assert findings[0].found.endswith("GPUs left over: 0")


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("qwen3_*.yaml"), *CONFIGS.glob("paper_*.yaml")]), ids=lambda path: path.stem
)
def test_its_tasks_and_workflow_are_there(path: Path) -> None:
    config = Config.load(path)
    assert config.tasks is not None
    tasks, held_out = load_tasks(config.tasks, "train", config.seed), load_eval_tasks(config)
    assert len(tasks) > 0
    assert len(held_out) == config.eval.num_tasks
    require_json((*tasks, *held_out))  # workers or not: one that adds them goes on
    assert callable(load_workflow(config.workflow))
