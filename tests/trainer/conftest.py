"""A tiny random model with a tokenizer, and batches of two-turn rollouts made from a seed."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from areal_agent.trainer.worker import Worker
from areal_agent.types import RolloutBatch, TokenRecord, Trajectory
from tests.histories import batch_of, trajectory
from tests.trainer.lab import connected

VOCAB_SIZE = 61


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def save_random_model(folder: Path, seed: int = 0, **changes: int) -> Path:
    """Save a model without a tokenizer. Its weights are large enough for peaked, distinct distributions."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(seed)
    config = Qwen3Config(**(shape | changes), tie_word_embeddings=True, initializer_range=0.15)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights, with one layer more."""
    return save_random_model(tmp_path_factory.mktemp("teacher"), seed=1, num_hidden_layers=3)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = save_random_model(tmp_path_factory.mktemp("model"))
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}").save_pretrained(folder)
    return folder


def random_record(
    rng: np.random.Generator,
    session: str,
    group: str,
    reward: float,
    *,
    branch: int = 0,
    version: int = 0,
    prompt: Sequence[int] = (),
) -> TokenRecord:
    """Prompt, action, observation, action, trailing observation, of random lengths; it begins as `prompt` does."""
    lengths = rng.integers([2, 2, 1, 2, 0], [12, 9, 15, 6, 4])
    is_sampled = np.repeat([False, True, False, True, False], lengths)
    num_tokens = len(is_sampled)
    token_ids = rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)
    shared = min(lengths[0], len(prompt))
    token_ids[:shared] = prompt[:shared]
    return TokenRecord(
        session_id=session,
        group_id=group,
        branch=branch,
        parent_branch=branch - 1 if branch else None,
        token_ids=token_ids,
        loss_mask=is_sampled,
        turn_index=np.repeat([0, 0, 1, 1, 1], lengths).astype(np.int32),
        behavior_logprobs=np.where(is_sampled, rng.uniform(-6, -2, num_tokens), 0).astype(np.float32),
        temperatures=np.where(is_sampled, 0.9, 1.0).astype(np.float32),
        versions=np.where(is_sampled, version, -1).astype(np.int32),
        turn_rewards=np.array([0.0, reward], dtype=np.float32),
    )


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., RolloutBatch]:
    """A batch of groups of four, which share up to `num_shared` tokens; every third rollout earns 1.

    Rollout 1 of each group has forked into two branches.
    """

    def make(step: int, *, num_groups: int = 3, seed: int = 0, num_shared: int = 12) -> RolloutBatch:
        rng = np.random.default_rng([seed, step])
        records: list[TokenRecord] = []
        trajectories: list[Trajectory] = []
        for number in range(num_groups):
            prompt = rng.integers(0, VOCAB_SIZE, num_shared)
            rewards = {f"s{step}-{number}-{i}": float((number + i) % 3 == 0) for i in range(4)}
            for i, (session, reward) in enumerate(rewards.items()):
                for branch in range(2 if i == 1 else 1):
                    more = {"branch": branch, "version": step - 1, "prompt": prompt}
                    records.append(random_record(rng, session, f"g{step}-{number}", reward, **more))
            trajectories += [
                trajectory(session, [], reward, group_id=f"g{step}-{number}", turns=())
                for session, reward in rewards.items()
            ]
        return batch_of(trajectories, records, step)

    return make


@pytest.fixture(scope="session")
def as_input() -> Callable[..., StepInput]:
    """What the trainer makes of a batch; its records may be replaced."""

    def convert(batch: RolloutBatch, records: Sequence[TokenRecord] | None = None) -> StepInput:
        rewards = {one.session_id: one.rewards.total for one in batch.trained}
        return StepInput(step=batch.step, records=batch.records if records is None else records, rewards=rewards)

    return convert


@pytest.fixture
def given(make_batch: Callable[..., RolloutBatch], as_input: Callable[..., StepInput]) -> StepInput:
    """The input of a first step."""
    return as_input(make_batch(1, num_groups=1))


@pytest.fixture
async def served() -> AsyncIterator[tuple[TrainerClient, threading.Thread]]:
    """A client that is connected to a worker in a thread, not initialised; and that thread."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=Worker().serve, args=(theirs,))
    thread.start()
    client = TrainerClient(connected(ours))
    yield client, thread
    await client.aclose()
    await asyncio.to_thread(thread.join)
    theirs.close()


@pytest.fixture
def open_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """`open_trainer(folder, config, algorithm)`; what it opened is closed in the end."""
    with ExitStack() as stack:

        def load(folder: Path, config: TrainerConfig, algorithm: AlgorithmConfig, **more: Any) -> Trainer:
            values = {"seed": 0, "shared_memory": tmp_path, "num_steps": 10, **more}
            trainer = Trainer(TrainerSetup(model=folder, trainer=config, algorithm=algorithm, **values))
            stack.callback(trainer.close)
            return trainer

        yield load
