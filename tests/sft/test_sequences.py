"""A chat as sequences, with masks worked out by hand and proved against renderings turn by turn:

1. the loss is on what the assistant says, through the token that ends it, and on nothing else; 2. for each packaged
template, what stands before an answer in its sequence is the very prompt that the model is served, and the answer is
what the template writes there; 3. a chat is one sequence, unless the template strips or rewrites the history; 4. an
answer of weight 0 is context; 5. what a template cannot write is refused; so is one without a generation prompt.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_agent.errors import ConfigError, RequestError
from areal_agent.sft.sequences import ChatRenderer, Example
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from tests.tokens.conftest import CHATML, FAMILIES, REWRITES_HISTORY, STRIPS_THINKING, TEMPLATES, save, train_tokenizer
from tests.tokens.test_real_templates import MODELS

SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "python", "description": "Runs.", "parameters": SCHEMA}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(code: str, **more: Any) -> dict[str, Any]:
    """A normalised call; its id has the form that Mistral's template asks for."""
    call = {"id": "call12345", "type": "function", "function": {"name": "python", "arguments": {"code": code}}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


RESULT = {"role": "tool", "content": "56", "tool_call_id": "call12345"}
AGENT = [user("What is 7 times 8?"), calls("print(7 * 8)"), RESULT, says("It is 56."), user("And 1?"), says("One.")]


@cache
def of_template(template: str) -> Renderer:
    return Renderer(train_tokenizer(template))


def learnt(renderer: Renderer, example: Example) -> list[str]:
    """The texts of the runs of tokens that are in the loss."""
    texts: list[str] = []
    run: list[int] = []
    for token, is_learnt in zip([*example.token_ids.tolist(), 0], [*example.loss_mask, False], strict=True):
        if is_learnt:
            run.append(token)
        elif run:
            texts.append(renderer.detokenizer.text_of(run))
            run = []
    return texts


def before(renderer: Renderer, example: Example) -> list[str]:
    """The text of the sequence before each run of tokens in the loss."""
    mask = example.loss_mask
    starts = [n for n in range(len(mask)) if mask[n] and not mask[n - 1]]
    return [renderer.detokenizer.text_of(example.token_ids[:start].tolist()) for start in starts]


def test_masks_by_hand() -> None:
    renderer = of_template(CHATML)
    (example,) = ChatRenderer(renderer).examples([user("hi"), says("a"), user("b"), says("c")])
    parts = [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("a<|im_end|>", True),
        ("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False),
        ("c<|im_end|>", True),
    ]
    ids = [(token, is_learnt) for text, is_learnt in parts for token in renderer.ids_of(text)]
    assert example.token_ids.tolist() == [token for token, _ in ids]
    assert example.loss_mask.tolist() == [is_learnt for _, is_learnt in ids]


def of_family(name: str, **options: Any) -> Renderer:
    if name in FAMILIES:
        return Renderer(train_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), FAMILIES[name]), **options)
    return Renderer(train_tokenizer((TEMPLATES / "real" / f"{name}.jinja").read_text(), MODELS[name]), **options)


THINKING = {
    name: "Hm."
    for name in ("qwen3", "qwen35", "nemotron_3", "step_35", "glm_45", "glm_47", "gpt_oss", "minimax_m2", "seed_oss")
}
OPENED = ("nemotron_3", "glm_47", "minimax_m2")
"""Templates that open thinking for every answer, so that one without thinking cannot be learnt."""
UNLIKE = ("deepseek_r1", "deepseek_v32")
"""Templates that never write an answer after what they open for it."""
CASES = [(name, None) for name in (*FAMILIES, *MODELS) if name not in (*OPENED, *UNLIKE)] + list(THINKING.items())


@pytest.mark.parametrize(("name", "thought"), CASES)
def test_each_answer_follows_the_prompt_that_is_served(name: str, thought: str | None) -> None:
    renderer = of_family(name)
    more = {} if thought is None else {"reasoning_content": thought}
    messages = [one | more if one["role"] == "assistant" else one for one in AGENT]
    examples = ChatRenderer(renderer).examples(messages, TOOLS)
    answers = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    found = [pair for one in examples for pair in zip(before(renderer, one), learnt(renderer, one), strict=True)]
    assert len(found) == len(answers)
    forms, tools = renderer.forms(messages), renderer.tool_forms(TOOLS)
    for index, (prompt, answer) in zip(answers, found, strict=True):
        assert prompt == renderer.write(forms[:index], tools)
        end = next(text for text in renderer.end_texts if answer.endswith(text))
        whole = renderer.template.render(forms[: index + 1], tools, add_generation_prompt=False)
        assert answer.removesuffix(end) in whole[-len(answer) - len(end) :]
        is_thinking = renderer.thinking.is_open(renderer.split_opened(prompt)[1])
        parsed = renderer.answer_format.parse(answer.removesuffix(end), tools=TOOLS, is_thinking=is_thinking)
        said: dict[str, Any] = messages[index]
        called = [call["function"]["arguments"] for call in said.get("tool_calls", [])]
        assert (parsed.content.strip(), parsed.reasoning or None) == (said["content"], thought)
        assert [call.arguments for call in parsed.tool_calls] == called


@pytest.mark.parametrize("name", [*OPENED, *UNLIKE])
def test_an_answer_that_is_not_written_where_the_model_answers_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"does not write messages\[1\] where the model answers, after .*think>"):
        ChatRenderer(of_family(name)).examples(AGENT, TOOLS)


def texts_of(renderer: Renderer, messages: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [learnt(renderer, one) for one in ChatRenderer(renderer).examples(messages)]


THOUGHT = [user("a"), says("<think>one</think>b"), user("c"), says("<think>two</think>d")]


@pytest.mark.parametrize(
    ("template", "sequences"),
    [
        (CHATML, [["<think>one</think>b<|im_end|>", "<think>two</think>d<|im_end|>"]]),
        (STRIPS_THINKING, [["<think>one</think>b<|im_end|>"], ["<think>two</think>d<|im_end|>"]]),
        (REWRITES_HISTORY, [["<think>one</think>b<|im_end|>"], ["<think>two</think>d<|im_end|>"]]),
    ],
    ids=["keeps", "strips", "rewrites"],
)
def test_a_sequence_goes_on_while_the_template_keeps_its_text(template: str, sequences: list[list[str]]) -> None:
    assert texts_of(of_template(template), THOUGHT) == sequences


def test_qwen3_thinks_on_within_a_tool_loop_and_forgets_with_the_next_question() -> None:
    renderer = of_family("qwen3")
    messages = [one | {"reasoning_content": "Hm."} if one["role"] == "assistant" else one for one in AGENT]
    first, second = texts_of(renderer, messages)
    assert [text.partition("</think>")[0] for text in first] == ["<think>\nHm.\n", "<think>\nHm.\n"]
    assert second == ["<think>\nHm.\n</think>\n\nOne.<|im_end|>"]


def test_a_template_that_keeps_thinking_makes_one_sequence(tmp_path: Path) -> None:
    folder = save(tmp_path, STRIPS_THINKING)
    renderer = Renderer.load(folder, history_thinking=HistoryThinking.KEEP)
    (only,) = texts_of(renderer, THOUGHT)
    assert only == ["<think>\none\n</think>\n\nb<|im_end|>", "<think>\ntwo\n</think>\n\nd<|im_end|>"]


def test_opened_thinking_is_learnt_by_the_template_that_keeps_it() -> None:
    thought = [user("a"), says("b", reasoning_content="one")]
    with pytest.raises(RequestError, match="if it has one, set history_thinking to 'keep'"):
        ChatRenderer(of_family("deepseek_r1")).examples(thought)
    renderer = of_family("deepseek_r1", history_thinking=HistoryThinking.KEEP)
    assert texts_of(renderer, thought) == [["one\n</think>\n\nb<｜end▁of▁sentence｜>"]]


def test_an_answer_of_weight_0_is_context() -> None:
    renderer = of_template(CHATML)
    messages = [user("a"), says("wrong", weight=0), user("no"), says("right", weight=1)]
    (example,) = ChatRenderer(renderer).examples(messages)
    assert learnt(renderer, example) == ["right<|im_end|>"]
    assert "wrong<|im_end|>" in before(renderer, example)[0]
    assert ChatRenderer(renderer).examples(messages[:3]) == ()


@pytest.mark.parametrize(("said", "text"), [("a\r\nb", "a\r\nb"), ("a\n", "a")])
def test_white_space_is_as_the_template_writes_it(said: str, text: str) -> None:
    renderer = of_template(CHATML.replace("message.content }}", "message.content | trim }}"))
    (example,) = ChatRenderer(renderer).examples([user("hi"), says(said)])
    assert learnt(renderer, example) == [f"{text}<|im_end|>"]


def test_control_tokens_in_a_message_are_plain_text() -> None:
    renderer = of_template(CHATML)
    (example,) = ChatRenderer(renderer).examples([user("hi<|im_end|>"), says("a<|im_end|>b")])
    assert learnt(renderer, example) == ["a<|im_end|>b<|im_end|>"]
    assert example.token_ids.tolist().count(renderer.end_token_id) == 2


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (says("b", reasoning_content="Hm."), "reasoning_content"),
        (calls("print(1)"), r"tool_calls\[0\]"),
        (says("hidden"), "content"),
    ],
)
def test_what_a_template_leaves_out_is_refused(answer: dict[str, Any], part: str) -> None:
    template = CHATML.replace("message.content }}", "message.content.replace('hidden', '') }}").replace(
        "message.tool_calls or []", "[]"
    )
    with pytest.raises(RequestError, match=rf"does not write messages\[1\].{part} \('.*'\), so it cannot be learnt"):
        ChatRenderer(of_template(template)).examples([user("a"), answer])


def test_a_template_without_a_generation_prompt_is_refused() -> None:
    template = CHATML.partition("{%- if add_generation_prompt")[0]
    with pytest.raises(
        ConfigError, match=r"no generation prompt: it writes '<\|im_start\|>assistant\\n' before an ans"
    ):
        ChatRenderer(of_template(template))


def test_an_answer_to_nothing_is_refused() -> None:
    bare = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(RequestError, match=r"messages\[0\] has nothing before it"):
        ChatRenderer(of_template(bare)).examples([says("a")])
