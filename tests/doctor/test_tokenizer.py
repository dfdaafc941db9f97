"""What the doctor says of chat templates and tokenizers, of the families that agents are trained with.

- plain conversations go on under their tokens; a template that counts its messages rewrites them
- thinking that is stripped is told with its remedy, and is not when it is kept
- tools are told with their format; a template without any is a warning
- a tokenizer with ids that the model does not know fails; one that lets text end a turn would
- a model that takes images is told
"""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.doctor.findings import State
from areal_agent.doctor.model import can_forge, is_reversible, template_findings, tokenizer_findings
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from tests.doctor.shapes import QWEN3_06B
from tests.tokens.conftest import CHATML, FAMILIES, REWRITES_HISTORY, TEMPLATES, train_tokenizer
from tests.vision import make_vision_model

CONFIG = Config.parse({"tasks": "tasks:load", "workflow": "flow:solve"})
KEEP = Config.parse({"tasks": "t:l", "workflow": "f:s", "rollout": {"history_thinking": "keep"}})


def family(name: str, *, keep: bool = False) -> Renderer:
    template = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
    thinking = HistoryThinking.KEEP if keep else HistoryThinking.TEMPLATE
    return Renderer(train_tokenizer(template, FAMILIES[name]), history_thinking=thinking)


async def states(renderer: Renderer, config: Config = CONFIG) -> list[State]:
    return [finding.state for finding in await template_findings(renderer, config)]


@pytest.mark.parametrize("name", ["qwen25", "llama3", "deepseek"])
async def test_a_family_whose_conversations_go_on(name: str) -> None:
    findings = await template_findings(family(name), CONFIG)
    assert "prefix-stable" in findings[0].found
    assert findings[-1].state is State.OK


async def test_thinking_that_is_stripped_is_told_with_its_remedy() -> None:
    plain, thinking, tools = await template_findings(family("qwen3"), CONFIG)
    assert (plain.state, thinking.state, tools.state) == (State.OK, State.WARN, State.OK)
    assert "strips the thinking" in thinking.found and "history_thinking=keep" in thinking.change
    assert "tool calls as qwen" in tools.found


async def test_thinking_that_is_kept_is_no_fault() -> None:
    assert await states(family("qwen3", keep=True), KEEP) == [State.OK, State.OK, State.OK]


async def test_a_template_that_opens_the_thinking_is_told_apart() -> None:
    plain = (await template_findings(family("deepseek_r1"), CONFIG))[0]
    assert plain.state is State.OK and "but for the thinking" in plain.found


async def test_a_template_that_rewrites_history_is_a_warning() -> None:
    plain = (await template_findings(Renderer(train_tokenizer(REWRITES_HISTORY)), CONFIG))[0]
    assert plain.state is State.WARN and "rewrites what was said before" in plain.found
    assert "after '" in plain.found and "stood, now '" in plain.found


async def test_a_template_without_tools_is_a_warning() -> None:
    bare = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template = bare + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    findings = await template_findings(Renderer(train_tokenizer(template)), CONFIG)
    assert [finding.state for finding in findings] == [State.OK, State.WARN]
    assert "writes no tool calls" in findings[1].found


async def test_a_tokenizer_with_unknown_ids_fails() -> None:
    renderer = Renderer(train_tokenizer(CHATML))
    assert is_reversible(renderer) and not can_forge(renderer)
    (fits,) = await tokenizer_findings(renderer, QWEN3_06B)
    (fails,) = await tokenizer_findings(renderer, replace(QWEN3_06B, vocab_size=100))
    assert fits.found.endswith("the model takes text alone")
    assert (fits.state, fails.state) == (State.OK, State.FAIL)
    assert "of the model's 100" in fails.found


async def test_a_model_that_sees_is_told(tmp_path: Path) -> None:
    (finding,) = await tokenizer_findings(Renderer.load(make_vision_model(tmp_path)), None)
    assert (finding.state, finding.found.partition("; ")[2]) == (
        State.OK, "an answer ends with '<|im_end|>'; the model takes images, too",
    )  # fmt: skip
