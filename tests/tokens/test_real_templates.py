"""The models' own chat templates (templates/real), each with a small tokenizer that has the model's control tokens:

- the tokens that end an answer, and an answer with a call, are found, also where a template writes none after them
- a tool's result goes on from the call as it was sampled, and so does the next question, but for thinking that the
  template leaves out
- a conversation with thinking, text and a call is never refused
"""

from dataclasses import replace
from functools import cache

import pytest

from areal_agent.doctor.model import NEXT, RESULT, continued
from areal_agent.tokens.forest import Forest, Reply
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason
from tests.tokens.conftest import (
    CHATML_FAMILY,
    CHATML_MARKUP,
    DEEPSEEK_FAMILY,
    TEMPLATES,
    Family,
    as_it_is,
    train_tokenizer,
)

GLM = Family(
    special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    eos="<|endoftext|>",
    markup=(*CHATML_MARKUP, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
DEEPSEEK_MARKUP = ("<｜User｜>", "<｜Assistant｜>", "｜DSML｜", "<think>", "</think>")
MODELS = {
    **dict.fromkeys(["qwen3_coder", "qwen35", "nemotron_3", "step_35"], CHATML_FAMILY),
    **dict.fromkeys(["glm_45", "glm_47"], GLM),
    "gpt_oss": Family(
        special=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        eos="<|return|>",
    ),
    "kimi_k2": Family(
        special=(
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        eos="<|im_end|>",
    ),
    "minimax_m2": Family(
        special=("]~!b[", "]~b]", "[e~["),
        eos="[e~[",
        markup=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
    ),
    **dict.fromkeys(["deepseek_v32", "deepseek_v4", "deepseek_r1"], replace(DEEPSEEK_FAMILY, markup=DEEPSEEK_MARKUP)),
    "gemma_4": Family(
        special=(
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
            *("<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
        ),
        bos="<bos>",
        eos="<eos>",
    ),
    "seed_oss": Family(
        special=("<seed:bos>", "<seed:eos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        bos="<seed:bos>",
        eos="<seed:eos>",
    ),
}


@cache
def renderer(name: str) -> Renderer:
    return Renderer(train_tokenizer((TEMPLATES / "real" / f"{name}.jinja").read_text(), MODELS[name]))


ENDS = {
    "glm_45": ("<|user|>", "<|observation|>"),
    "glm_47": ("<|user|>", "<|observation|>"),
    "gpt_oss": ("<|return|>", "<|call|>"),
    "gemma_4": ("<turn|>", "<|tool_response>"),
}
FORGETFUL = ("deepseek_v32", "deepseek_v4")  # thinking is off, and left out with the next prompt


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_that_end_an_answer(name: str) -> None:
    assert renderer(name).end_texts == ENDS.get(name, (MODELS[name].eos,))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("content", ["", "I look."])
@pytest.mark.parametrize("thought", [None, "Hm."])
def test_a_result_goes_on_from_the_call_as_it_was_sampled(name: str, content: str, thought: str | None) -> None:
    if renderer(name).answer_format.thinking is None:
        thought = None
    reason, _ = continued(renderer(name), RESULT, content=content, calls=True, thought=thought)
    is_forgotten = name in FORGETFUL and (thought is not None or name == "deepseek_v32")
    assert reason is (ForkReason.TEMPLATE_STRIPS_THINKING if is_forgotten else None)


@pytest.mark.parametrize("name", MODELS)
def test_the_next_question_goes_on_from_the_answer(name: str) -> None:
    has_thinking = renderer(name).answer_format.thinking is not None
    reason, _ = continued(renderer(name), NEXT, thought="Hm." if has_thinking else None)
    assert reason in (None, ForkReason.TEMPLATE_STRIPS_THINKING)


def test_an_answer_of_gpt_oss_without_its_thinking_keeps_the_sampled_tokens() -> None:
    model = renderer("gpt_oss")
    forest, asked = Forest(model), {"role": "user", "content": "What is 6 times 7?"}
    prompt = forest.plan([asked], (), normalise=as_it_is)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|return|>"
    answer = {"role": "assistant", "content": "It is 42.", "reasoning_content": "Hm."}
    reply = Reply(completion_id="c1", token_ids=model.ids_of(text), message=answer, has_thinking=True)
    forest.record(prompt, [reply])
    following = forest.plan([asked, answer, NEXT], (), normalise=as_it_is)
    assert following.parent is not None
    assert model.text_of(following.path(), has_ended=False) == model.render([asked, answer, NEXT])
