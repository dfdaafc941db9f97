"""Shared by all tests: a small random model, made once a session."""

import gc
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does: no time is asserted. The few examples are always the
# same, so that a change fails by what it changed; `pytest --hypothesis-profile=search`, as in .ci/full, looks for more.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, max_examples=20)
settings.load_profile("same")

# A shell that runs the tests in the background has SIGINT ignored, and the processes under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What modules and the collection make stays to the end: the garbage collector would look through it again and again.
gc.disable()


@pytest.hookimpl(tryfirst=True)  # that of pytest-xdist ends the call
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random Qwen3 with a ChatML tokenizer; it knows nothing and answers at once."""
    import torch  # here, because the process that only hands tests to pytest-xdist's workers reads this file, too
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from areal_agent.models.recipe import train_tokenizer

    folder = tmp_path_factory.mktemp("small_model")
    tokenizer = train_tokenizer((f"What is {n} + {n * 7}?\nThe answer is {n * 8}." for n in range(500)), vocab_size=400)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
