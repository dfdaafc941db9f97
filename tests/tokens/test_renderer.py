"""The chat template and the tokenizer:

- special-token text in tool definitions and in keys becomes plain text; test_provable_tokens.py has that of messages
- markup of answers keeps its meaning in assistant messages; turn tokens do not
- the text after an answer that ended itself begins after the end token; after one that was cut off, with it
- the truncation and padding that training scripts leave in tokenizer.json change nothing
- an answer's text leaves out the token that ended it, and keeps special tokens inside
- a folder without tokenizer or template, and a template that does not end answers, are refused at load
- a template's own refusal becomes an error of the request
- the format of answers is detected from the template; a given format overrides only its own part
"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.renderer import Renderer

QUESTION = [{"role": "user", "content": "the quick fox?"}]
TOOLS = [{"type": "function", "function": {"name": "python", "description": "runs code"}}]


def ids_of(renderer: Renderer, *messages: dict[str, object]) -> list[int]:
    return renderer.ids_of(renderer.render(messages))


def test_special_tokens_in_tool_definitions_are_plain_text(renderer: Renderer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": "<|im_start|>"}}}]
    ids = renderer.ids_of(renderer.render(QUESTION, tools))
    assert ids.count(renderer.end_token_id) == 2  # the system message's and the question's


def test_answers_keep_their_markup_and_lose_turn_tokens(renderer: Renderer) -> None:
    content = "<think>hm</think><|im_end|>ok"
    ids = ids_of(renderer, *QUESTION, {"role": "assistant", "content": content})
    assert ids.count(5) == ids.count(6) == 1  # <think>, </think>
    assert ids.count(renderer.end_token_id) == 2  # the question's and the answer's


def test_after_an_answer_that_ended_itself_the_bridge_is_new(renderer: Renderer) -> None:
    ids = renderer.ids_after((9, renderer.end_token_id), "<|im_end|>\n<|im_start|>user\n")
    assert renderer.text_of(ids, has_ended=False) == "\n<|im_start|>user\n"


@pytest.mark.parametrize("sampled", [(9,), (9, 0), ()], ids=["length", "another end token", "nothing"])
def test_after_an_answer_that_was_cut_off_the_end_token_is_new(renderer: Renderer, sampled: tuple[int, ...]) -> None:
    ids = renderer.ids_after(sampled, "<|im_end|>\n<|im_start|>user\n")
    assert renderer.text_of(ids, has_ended=False) == "<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize("content", ["the quick fox?", "le renard pressé"])
def test_no_prompt_is_truncated_or_padded(
    renderer: Renderer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, content: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    message = {"role": "user", "content": content}
    assert ids_of(Renderer.load(tmp_path), message) == ids_of(renderer, message)


def test_text_leaves_out_the_end_and_keeps_special_tokens_inside(renderer: Renderer) -> None:
    ids = [*renderer.ids_of("<tool_call>x</tool_call>"), renderer.end_token_id]
    assert renderer.text_of(ids, has_ended=True) == "<tool_call>x</tool_call>"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, r"no tokenizer\.json"),
        ("tokenizer.json", "{}", r"the tokenizer in .* cannot be loaded: \w+Error"),
        ("chat_template.jinja", None, "no chat template"),
        (
            "chat_template.jinja",
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "no special token",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Renderer.load(tmp_path)


def test_a_refusal_of_the_template_is_the_requests_error(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    refusing = "{%- if messages[0].role == 'tool' %}{{- raise_exception('no tool may begin') }}{%- endif %}"
    (tmp_path / "chat_template.jinja").write_text(refusing + template)
    with pytest.raises(RequestError, match="no tool may begin") as caught:
        Renderer.load(tmp_path).render([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages[0]"


def test_a_given_form_of_answers_stands_for_the_templates(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    own = Renderer.load(tmp_path).answer_format
    assert own == AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
    given = Renderer.load(tmp_path, tool_format=ToolFormat.MISTRAL).answer_format
    assert given == AnswerFormat(tool_format=ToolFormat.MISTRAL, reasoning_format=own.reasoning_format)
    thinking = Renderer.load(tmp_path, reasoning_format=ReasoningFormat.THINK).answer_format
    assert thinking.parse("<think>hm</think>so").reasoning == "hm"
