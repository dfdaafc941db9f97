"""The model of a config: whether it is here, whether it can be served and trained, its sizes, tokenizer and template.

The tokenizer must be the model's, restore texts exactly, and let no text forge a turn. The chat template is tried with
three conversations in a `Forest`, as the gateway holds them: plain, with thinking, with a tool. In each, an answer is
recorded and continued; the check is whether the continuation keeps the tokens that were sampled.

The sizes are those of a decoder of Llama's form, dense or with experts, from its config.json; for other forms they are
an estimate. V vocabulary, H hidden, I intermediate, L layers, Q query and K key-value heads of dimension D. Parameters:

    layer   2 H Q D + 2 H K D + 3 H I + 2 H      q and o; k and v; gate, up and down; two norms
            + 2 D                                norms of queries and keys (Qwen3)
            + Q D + 2 K D                        biases of q, k and v (Qwen2)
            3 H E J + H E instead of 3 H I       E experts of size J and their router
    model   V H + L layer + H                    embedding, layers, the last norm
            + V H                                an output layer that is not the embedding again
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from areal_agent.cluster.local import describe_model, is_described, obtain_model, read_described
from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, State, gib
from areal_agent.errors import ConfigError, RequestError
from areal_agent.models.recipe import RECIPE, Recipe, demonstrations_of
from areal_agent.observe.progress import Progress
from areal_agent.run.preflight import check_context, check_model, require_trainable, told_calls, told_images
from areal_agent.tokens.forest import Forest, Reply
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from areal_agent.types import ForkReason, JsonObject

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
HEAD_NORM_TYPES = ("qwen3", "qwen3_moe")
BIASED_TYPES = ("qwen2",)
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder, whose layers may have experts.

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
    num_experts: int = 0
    expert_size: int = 0  # the inner size of one expert; `intermediate_size` is that of all that one token passes
    dtype: str | None = None  # of its files
    num_teacher_parameters: int = 0  # of a frozen teacher that the trainer holds beside it

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a Hugging Face folder, or its config.json. Raises ConfigError where that lacks a size."""
        return cls.of(read_described(path))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Read a decoded config.json. Raises ConfigError where it lacks a size."""
        fields = fields.get("text_config") or fields
        try:
            num_heads, hidden_size = fields["num_attention_heads"], fields["hidden_size"]
            num_experts = next((fields[name] for name in NUM_EXPERTS if fields.get(name)), 0)
            expert_size = fields.get("moe_intermediate_size") or fields["intermediate_size"]
            num_passed = fields.get("num_experts_per_tok", 1) + (fields.get("n_shared_experts") or 0)
            return cls(
                model_type=fields["model_type"],
                vocab_size=fields["vocab_size"],
                hidden_size=hidden_size,
                intermediate_size=num_passed * expert_size if num_experts else fields["intermediate_size"],
                num_experts=num_experts,
                expert_size=expert_size if num_experts else 0,
                num_layers=fields["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=fields.get("num_key_value_heads") or num_heads,
                head_dim=fields.get("head_dim") or hidden_size // num_heads,
                is_tied=bool(fields.get("tie_word_embeddings", False)),
                dtype=fields.get("dtype") or fields.get("torch_dtype"),
            )
        except KeyError as error:
            raise ConfigError(
                f"the model's config.json has no {error.args[0]!r}: its memory cannot be estimated; give a model whose "
                "config names sizes as Llama's does"
            ) from None

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """Return the shape of the tiny model before it is built; its vocabulary may turn out smaller."""
        return cls.of(
            {
                **asdict(recipe),
                "model_type": "qwen3",
                "num_hidden_layers": recipe.num_layers,
                "num_attention_heads": recipe.num_heads,
                "tie_word_embeddings": True,
                "dtype": "float32",
            }
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
        feed_forward = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        return {
            "q_proj": (hidden, self.query_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.query_size, hidden),
            **({} if self.num_experts else feed_forward),
        }

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters in the matrices of all layers."""
        experts = self.num_experts * self.hidden_size * (3 * self.expert_size + 1)
        return self.num_layers * (experts + sum(inputs * outputs for inputs, outputs in self.linear_layers.values()))

    def num_adapter_parameters(self, rank: int, modules: Collection[str]) -> int:
        """Return the parameters of adapters (LoRA) of these matrices in all layers: R (inputs + outputs) each."""
        return self.num_layers * sum(rank * sum(self.linear_layers.get(name, ())) for name in modules)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_head_norms else 0)
        biases = self.query_size + 2 * self.kv_size if self.model_type in BIASED_TYPES else 0
        return self.num_matrix_parameters // self.num_layers + norms + biases

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
    """The folder of a model, or its config.json alone; None for a tiny one that is not built and was not asked for."""

    folder: Path | None


async def find_model(config: Config, logs: Path, progress: Progress, *, with_weights: bool, is_here: bool) -> Found:
    """Return the folder that a run would use, built or downloaded as a run does it; or only its small files.

    A run that is elsewhere (`is_here` is false) has its weights there: the config.json is enough. Raises ConfigError
    and ProcessDied.
    """
    folder: Path | None = Path(config.model)
    if is_here or not is_described(folder):
        check_model(config.model, config.engine)
        if with_weights:
            folder = await obtain_model(config.model, config.seed, logs, progress)
        else:
            folder = await describe_model(config.model, config.seed)
    if folder is not None:
        await asyncio.to_thread(require_trainable, folder, config.engine)
    return Found(folder=folder)


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


async def shape_of(config: Config, folder: Path | None) -> ModelShape:
    """Return the model's sizes, and its teacher's. Raises ConfigError where they are not known."""
    shape, teacher = _shape(config.model, folder), config.algorithm.teacher
    if teacher is None or teacher.model is None or teacher.url is not None:
        return shape
    found = Path(teacher.model)
    if not is_described(found):
        found = await describe_model(teacher.model, config.seed)
    return replace(shape, num_teacher_parameters=_shape(teacher.model, found).num_parameters)


def _shape(model: str, folder: Path | None) -> ModelShape:
    if folder is not None:
        return ModelShape.read(folder)
    if demonstrations_of(model) is None:
        raise ConfigError(f"the sizes of {model!r} are not known because it is not here; give a folder")
    return ModelShape.of_recipe(RECIPE)


async def model_findings(config: Config, folder: Path | None, shape: ModelShape) -> list[Finding]:
    """Report what the model is. Raises ConfigError where it was made for shorter contexts."""
    check_context(config, folder)
    million = shape.num_parameters / 1e6
    where = "built on first use" if folder is None else str(folder)
    found = (
        f"{shape.model_type}, {million:,.1f} million parameters, stored in {shape.dtype or 'an unknown type'} "
        f"({gib(FLOAT32_BYTES * shape.num_parameters)} in float32): {where}"
    )
    return [Finding("model", State.OK, found)]


SAMPLE = 'Naïve café: 3 × 7 = 21,\n\tdef f(x): return {"a": [x, 1.5]}  # 你好, Привет 🙂\n'


async def tokenizer_findings(renderer: Renderer, shape: ModelShape | None) -> list[Finding]:
    """Return one finding: the first fault, or none."""
    ends = ", ".join(repr(text) for text in renderer.end_texts)
    known = f" of the model's {shape.vocab_size:,}" if shape else ""
    found = f"{renderer.vocab_size:,} ids{known}; an answer ends with {ends}; the model "
    found += await asyncio.to_thread(told_images, renderer)
    if shape is not None and renderer.vocab_size > shape.vocab_size:
        change = "it has ids that the model does not know: use the tokenizer of this model"
        return [Finding("tokenizer", State.FAIL, found, change)]
    if not is_reversible(renderer):
        found = f"{found}; a text comes back changed"
        return [Finding("tokenizer", State.WARN, found, "tool output may reach the model changed")]
    if can_forge(renderer):
        found = f"{found}; text in a message can end a turn"
        return [Finding("tokenizer", State.FAIL, found, "report this tokenizer as a bug")]
    return [Finding("tokenizer", State.OK, found)]


def is_reversible(renderer: Renderer) -> bool:
    """Return whether a text that is tokenised and decoded is unchanged."""
    return renderer.text_of(renderer.ids_of(SAMPLE), has_ended=False) == SAMPLE


def can_forge(renderer: Renderer) -> bool:
    """Return whether the text of an end token in a message becomes that token."""
    plain, forged = (
        renderer.ids_of(renderer.render([{"role": "user", "content": content}]))
        for content in ("x", renderer.end_texts[0])
    )
    return forged.count(renderer.end_token_id) > plain.count(renderer.end_token_id)


QUESTION: JsonObject = {"role": "user", "content": "What is 6 times 7?"}
NEXT: JsonObject = {"role": "user", "content": "And 8 times 9?"}
CALL = ToolCall(name="multiply", arguments={"a": 6, "b": 7})
CALL_ID = "call00001"  # nine letters and digits: Mistral's template refuses others
CALL_OF_MESSAGE = {"id": CALL_ID, "type": "function", "function": {"name": CALL.name, "arguments": CALL.arguments}}
RESULT: JsonObject = {"role": "tool", "content": "42", "tool_call_id": CALL_ID}
NUMBER = {"type": "number"}
FUNCTION: JsonObject = {
    "name": CALL.name,
    "description": "Multiplies two numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
}
TOOLS: tuple[JsonObject, ...] = ({"type": "function", "function": FUNCTION},)
ANSWER = "It is 42."
THOUGHT = "Six sevens are forty-two."


async def template_findings(renderer: Renderer, config: Config) -> list[Finding]:
    """Return how the template treats plain conversations, thinking, and tools."""
    findings = [_plain(renderer)]
    if renderer.answer_format.reasoning_format is ReasoningFormat.THINK:
        findings.append(_thinking(renderer, config.rollout.history_thinking))
    return [*findings, _tools(renderer)]


def continued(
    renderer: Renderer, after: JsonObject, *, content: str = ANSWER, thought: str | None = None, calls: bool = False
) -> tuple[ForkReason | None, str]:
    """Ask, record an answer, and continue with `after`: None when the answer's tokens stay, else why not, and where.

    Raises RequestError where the template refuses the conversation.
    """
    forest, tools = Forest(renderer), TOOLS if calls else ()
    asked = forest.plan([QUESTION], tools, normalise=_as_it_is)
    if asked.is_thinking and thought is None:
        thought = THOUGHT
    text = renderer.answer_format.format(content, (CALL,) if calls else (), reasoning=thought)
    if asked.is_thinking:  # the prompt has opened the thinking
        text = text.partition("<think>\n")[2]
    message: dict[str, object] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [CALL_OF_MESSAGE]
    if thought is not None:
        message["reasoning_content"] = thought
    ids = (*renderer.ids_of(text), renderer.end_token_id)
    reply = Reply(completion_id="c1", token_ids=ids, message=message, has_thinking=thought is not None)
    forest.record(asked, [reply])
    reason = forest.plan([QUESTION, message, after], tools, normalise=_as_it_is).fork_reason
    return reason, _parting(
        renderer.render([QUESTION], tools) + text, renderer.render([QUESTION, message, after], tools)
    )


def _parting(before: str, now: str) -> str:
    """Return where two texts part.

    >>> _parting("user: 6 x 7? it: 42", "user 1: 6 x 7? it: 42 user 2: 8 x 9?")
    "after 'user', where ': 6 x 7? it: 42' stood, now ' 1: 6 x 7? it: 42 user 2'"
    """
    at = next((place for place, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), len(before))
    return f"after {before[:at][-24:]!r}, where {before[at:][:24]!r} stood, now {now[at:][:24]!r}"


def _plain(renderer: Renderer) -> Finding:
    reason, where = continued(renderer, NEXT)
    if reason is None:
        found = "prefix-stable: a turn adds its new tokens, and sampled ones stand as they were"
        return Finding("template", State.OK, found)
    if reason is ForkReason.TEMPLATE_STRIPS_THINKING:
        return Finding("template", State.OK, "prefix-stable, but for the thinking that it opens in each answer")
    return Finding(
        "template",
        State.WARN,
        f"rewrites what was said before ({reason}), {where}: each turn is a root of its own, whose history is "
        "computed and trained on again",
        "use a template that writes each message the same whatever follows it",
    )


def _thinking(renderer: Renderer, history_thinking: HistoryThinking) -> Finding:
    reason, where = continued(renderer, NEXT, thought=THOUGHT)
    if reason is None:
        kept = "by rollout.history_thinking" if history_thinking is HistoryThinking.KEEP else "by the template itself"
        return Finding("template", State.OK, f"thinking of earlier answers stays in the prompt, {kept}")
    if reason is not ForkReason.TEMPLATE_STRIPS_THINKING:
        return Finding(
            "template", State.WARN, f"a conversation with thinking does not keep its tokens ({reason}), {where}"
        )
    return Finding(
        "template",
        State.WARN,
        "strips the thinking of earlier answers: the turn after one that thought is a branch, from where the first "
        "stripped answer begins",
        "this is recorded and trained correctly, at more tokens per turn; rollout.history_thinking=keep leaves it in, "
        "and exports a template that does",
    )


def _tools(renderer: Renderer) -> Finding:
    found = told_calls(renderer)
    if not renderer.answer_format.has_calls:
        return Finding("template", State.WARN, found, "fine for workflows without tools")
    try:
        reason, where = continued(renderer, RESULT, content="", calls=True)
    except RequestError as error:
        return Finding("template", State.WARN, f"{found}; {error}", "fine for workflows without tools")
    if reason is not None:
        return Finding(
            "template", State.WARN, f"{found}; after a tool's result it rewrites history ({reason}), {where}"
        )
    return Finding("template", State.OK, f"{found}; a tool's result goes on from the call as it was sampled")


def _as_it_is(message: JsonObject, _: int) -> JsonObject:
    return message
