"""A template that keeps thinking, rendered by plain transformers:

- thinking in the content or beside it, before a plain answer or a tool call, is written as a model writes it
- conversations without thinking are written as by the original
- the history of a tool loop is written as the original writes it while it is new
- a derived template is not derived again, one without thinking is unchanged, and without a template there is none
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from areal_agent.tokens.renderer import Renderer, exported_template
from areal_agent.tokens.template import HistoryThinking, keep_template

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
QUESTION, NEXT = {"role": "user", "content": "hi"}, {"role": "user", "content": "why?"}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "abcdefghi"}
THINKING = ("qwen3", "deepseek", "deepseek_r1")


def render(folder: Path, messages: list[dict[str, Any]], *, keep: bool) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    template = keep_template(tokenizer.chat_template) if keep else tokenizer.chat_template
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    )


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "assistant", "content": "hm\n</think>\n\nyes"},
    ],
    ids=["in content", "beside it", "opened by the prompt"],
)
def test_thinking_is_written_as_by_the_model(
    family_folders: dict[str, Path], name: str, answer: dict[str, Any]
) -> None:
    text = render(family_folders[name], [QUESTION, answer, NEXT], keep=True)
    assert "<think>\nhm\n</think>\n\nyes" in text
    without = [QUESTION, {"role": "assistant", "content": "yes"}, NEXT]
    assert text.replace("<think>\nhm\n</think>\n\n", "") == render(family_folders[name], without, keep=False)


def test_thinking_before_a_call_is_written_as_in_a_new_loop(family_folders: dict[str, Path]) -> None:
    calling = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    loop = [QUESTION, calling, RESULT]
    new = render(family_folders["qwen3"], loop, keep=False)
    assert "<think>\nhm\n</think>\n\n<tool_call>" in new
    assert render(family_folders["qwen3"], loop, keep=True) == new
    old = render(family_folders["qwen3"], [*loop, {"role": "assistant", "content": "fine"}, NEXT], keep=True)
    assert old.startswith(new.removesuffix("<|im_start|>assistant\n"))


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "mistral", "deepseek", "deepseek_r1"])
def test_without_thinking_nothing_changes(family_folders: dict[str, Path], name: str) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [QUESTION, calling, RESULT, {"role": "assistant", "content": "fine "}, NEXT]
    assert render(family_folders[name], messages, keep=True) == render(family_folders[name], messages, keep=False)


def test_a_derived_template_stays(family_folders: dict[str, Path]) -> None:
    template = exported_template(family_folders["qwen3"], HistoryThinking.KEEP)
    assert template is not None
    assert keep_template(template) == template
    assert exported_template(family_folders["qwen3"], HistoryThinking.TEMPLATE) is None


def test_without_a_template_there_is_none_to_export(family_folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(family_folders["qwen3"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert exported_template(tmp_path, HistoryThinking.TEMPLATE) is None


def test_a_template_without_thinking_stays(family_folders: dict[str, Path]) -> None:
    assert keep_template(Renderer.load(family_folders["mistral"]).chat_template) == (
        Renderer.load(family_folders["mistral"]).chat_template
    )
