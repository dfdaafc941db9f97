"""The model of a config: whether it is here, whether it can be served and trained, and its sizes.

The sizes are those of a dense decoder, from its config.json. V vocabulary, H hidden, I intermediate, L layers, Q query
and K key-value heads of dimension D. Parameters:

    layer   2 H Q D + 2 H K D + 3 H I + 2 H      q and o; k and v; gate, up and down; two norms
            + 2 D                                norms of queries and keys (Qwen3)
            + Q D + 2 K D                        biases of q, k and v (Qwen2)
    model   V H + L layer + H                    embedding, layers, the last norm
            + V H                                an output layer that is not the embedding again
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal_agent.cluster.local import describe_model, obtain_model
from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, State
from areal_agent.doctor.machine import gib
from areal_agent.errors import ConfigError
from areal_agent.models.recipe import RECIPE, Recipe, demonstrations_of
from areal_agent.observe.progress import Progress
from areal_agent.run.preflight import MODEL_TYPES, check_model, check_model_folder

FLOAT32_BYTES = 4
HEAD_NORM_TYPES = ("qwen3",)
BIASED_TYPES = ("qwen2",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A dense decoder of the kind that the embedded engine serves.

    >>> ModelShape(model_type="llama", vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=2,
    ...            num_kv_heads=1, head_dim=2, is_tied=True).num_parameters
    196
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    max_context_tokens: int | None = None  # the longest it was made for
    dtype: str | None = None  # of its files

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a Hugging Face folder. Raises ConfigError where its config.json lacks a size."""
        try:
            fields = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the config.json in {str(folder)!r} cannot be read: {error}") from error
        return cls.of(fields)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Read a decoded config.json. Raises ConfigError where it lacks a size."""
        try:
            num_heads, hidden_size = fields["num_attention_heads"], fields["hidden_size"]
            return cls(
                model_type=fields["model_type"],
                vocab_size=fields["vocab_size"],
                hidden_size=hidden_size,
                intermediate_size=fields["intermediate_size"],
                num_layers=fields["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=fields.get("num_key_value_heads") or num_heads,
                head_dim=fields.get("head_dim") or hidden_size // num_heads,
                is_tied=bool(fields.get("tie_word_embeddings", False)),
                max_context_tokens=fields.get("max_position_embeddings"),
                dtype=fields.get("dtype") or fields.get("torch_dtype"),
            )
        except KeyError as error:
            raise ConfigError(
                f"the model's config.json has no {error.args[0]!r}: its memory cannot be estimated; use a Llama, "
                "Mistral or Qwen model"
            ) from None

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """Return the shape of the tiny model before it is built; its vocabulary may turn out smaller."""
        return cls(
            model_type="qwen3",
            vocab_size=recipe.vocab_size,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_layers=recipe.num_layers,
            num_heads=recipe.num_heads,
            num_kv_heads=recipe.num_heads,
            head_dim=recipe.head_dim,
            is_tied=True,
            max_context_tokens=recipe.max_context_tokens,
            dtype="float32",
        )

    @property
    def query_size(self) -> int:
        """Q D"""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """K D"""
        return self.num_kv_heads * self.head_dim

    @property
    def has_head_norms(self) -> bool:
        return self.model_type in HEAD_NORM_TYPES

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the embedding, which is also the output layer where they are tied."""
        return self.vocab_size * self.hidden_size

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of one layer, by name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.query_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.query_size, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters in the matrices of all layers."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.linear_layers.values())

    def num_adapter_parameters(self, rank: int, modules: Collection[str]) -> int:
        """Return the parameters of adapters (LoRA) of these matrices in all layers: R (inputs + outputs) each."""
        return self.num_layers * sum(rank * sum(self.linear_layers.get(name, ())) for name in modules)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer."""
        matrices = sum(inputs * outputs for inputs, outputs in self.linear_layers.values())
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_head_norms else 0)
        biases = self.query_size + 2 * self.kv_size if self.model_type in BIASED_TYPES else 0
        return matrices + norms + biases

    @property
    def num_backbone_parameters(self) -> int:
        """Parameters of everything below the output layer."""
        return self.num_embedding_parameters + self.num_layers * self.num_layer_parameters + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        return self.num_backbone_parameters + (0 if self.is_tied else self.num_embedding_parameters)

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a token's keys and values in all layers: 2 L K D elements."""
        return 2 * self.num_layers * self.kv_size * element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The folder of a model; None for a tiny one that is not built yet and was not asked for."""

    folder: Path | None


async def find_model(config: Config, logs: Path, *, with_weights: bool) -> Found:
    """Return the folder that a run would use, built or downloaded as a run does it; or only its small files.

    Raises ConfigError and ProcessDied.
    """
    check_model(config.model)
    if not with_weights:
        return Found(folder=await describe_model(config.model, config.seed))
    folder = await obtain_model(config.model, config.seed, logs, Progress(total_steps=0, mode="none"))
    check_model_folder(folder)
    return Found(folder=folder)


async def shape_of(config: Config, folder: Path | None) -> ModelShape:
    """Return the model's sizes. Raises ConfigError where they are not known."""
    if folder is not None:
        return ModelShape.read(folder)
    if demonstrations_of(config.model) is None:
        raise ConfigError(f"the sizes of {config.model!r} are not known because it is not here; give a folder")
    return ModelShape.of_recipe(RECIPE)


def model_finding(config: Config, folder: Path | None, shape: ModelShape) -> Finding:
    """Report what the model is, and whether engine and trainer support it."""
    million = shape.num_parameters / 1e6
    where = "built on first use" if folder is None else str(folder)
    found = (
        f"{shape.model_type}, {million:,.1f} million parameters, stored in {shape.dtype or 'an unknown type'} "
        f"({gib(FLOAT32_BYTES * shape.num_parameters)} in float32): {where}"
    )
    longest, asked = shape.max_context_tokens, config.engine.max_context_tokens
    if shape.model_type not in MODEL_TYPES:
        return Finding(
            check="model",
            state=State.FAIL,
            found=f"{found}; type {shape.model_type!r} is not served",
            change=f"use a model of type {', '.join(MODEL_TYPES)}",
        )
    if longest is not None and asked > longest and not config.is_online:
        return Finding(
            check="model",
            state=State.FAIL,
            found=f"{found}; it was made for {longest} tokens, but engine.max_context_tokens is {asked}",
            change=f"set engine.max_context_tokens to at most {longest}",
        )
    return Finding(check="model", state=State.OK, found=found)
