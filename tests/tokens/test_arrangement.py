"""What templates are given, so that nothing of what an agent sent is left out:

- system messages at the head are one; later ones have a place; what has none is refused by name
- results are in the order of their calls; a template that takes one call gets one with each result
- text beside a call that the client wrote is written
- ids of calls are the model's own in prompts, in results, too, and of the template's form where the client made them
- a template without tools writes definitions and calls in the format that was named, and is exported so
- a template decides on the text that was sent, while control texts in it stay text
- thinking that is stripped leaves what the template writes in its place
"""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_agent.errors import RequestError
from areal_agent.tokens.forest import Forest, Reply
from areal_agent.tokens.formats.answer_format import ToolFormat
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from areal_agent.types import JsonObject
from tests.tokens.conftest import CHATML_FAMILY, as_it_is, train_tokenizer
from tests.tokens.test_real_templates import renderer as real

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

# As SmolLM2's: roles and contents, and nothing of tools.
PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def says(role: str, content: str, **more: Any) -> JsonObject:
    return {"role": role, "content": content, **more}


def calls(*ids: str, content: str = "") -> JsonObject:
    made = [{"id": id_, "type": "function", "function": {"name": "look", "arguments": {"at": id_}}} for id_ in ids]
    return says("assistant", content, tool_calls=made)


def result(id_: str) -> JsonObject:
    return says("tool", f"saw {id_}", tool_call_id=id_)


def prompt_of(model: Renderer, *messages: JsonObject, tools: Any = ()) -> str:
    plan = Forest(model).plan(messages, tools, normalise=as_it_is)
    return model.text_of(plan.path(), has_ended=False)


@pytest.mark.parametrize(("name", "later"), [("qwen35", "user"), ("minimax_m2", "user"), ("qwen3_coder", "system")])
def test_every_system_message_has_a_place(name: str, later: str) -> None:
    text = prompt_of(
        real(name), says("system", "One."), says("system", "Two."), says("user", "Hi."), says("system", "Three.")
    )
    assert "One.\n\nTwo." in text
    place = text.partition("Hi.")[2].partition("Three.")[0]
    assert place.endswith(f"{later}\n")


def test_gpt_oss_loses_no_instruction() -> None:
    text = prompt_of(real("gpt_oss"), says("system", "One."), says("user", "Hi."), says("system", "Two."))
    assert text.index("One.") < text.index("Hi.") < text.index("<|start|>user<|message|>Two.")


@pytest.mark.parametrize("name", ["gpt_oss", "minimax_m2", "gemma_4"])
def test_a_result_without_its_call_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        RequestError, match=r"messages\[1\].*send a result only after the answer that has its call"
    ) as caught:
        prompt_of(real(name), says("user", "Hi."), result("a"), tools=[TOOL])
    assert caught.value.param == "messages[1]"


def test_results_are_in_the_order_of_their_calls() -> None:
    text = prompt_of(
        real("qwen35"), says("user", "x"), calls("Paris", "Rome"), result("Rome"), result("Paris"), tools=[TOOL]
    )
    assert text.index("saw Paris") < text.index("saw Rome")


def test_a_template_that_takes_one_call_gets_each_with_its_result() -> None:
    text = prompt_of(real("gpt_oss"), says("user", "x"), calls("a", "b"), result("b"), result("a"), tools=[TOOL])
    places = [text.index(word) for word in ('{"at": "a"}', "saw a", '{"at": "b"}', "saw b")]
    assert places == sorted(places)


def test_text_beside_a_call_is_written(families: dict[str, Renderer]) -> None:
    asked = (says("user", "x"), calls("a", content="I look."), result("a"))
    assert "I look.<|eot_id|>" in prompt_of(families["llama3"], *asked, tools=[TOOL])


def test_a_call_and_its_result_have_the_models_id() -> None:
    model, forest = real("kimi_k2"), Forest(real("kimi_k2"))
    talk = [says("user", "x")]
    for number, own in enumerate(("functions.look:0", "functions.look:0")):  # the model gives one id twice
        prompt = forest.plan(list(talk), [TOOL], normalise=as_it_is)
        sampled = model.answer_format.format(
            "",
            model.answer_format.parse(
                f'<|tool_calls_section_begin|><|tool_call_begin|>{own}<|tool_call_argument_begin|>{{"at": {number}}}'
                "<|tool_call_end|><|tool_calls_section_end|>"
            ).tool_calls,
        )
        answer = calls(f"ours{number}")
        answer["tool_calls"][0]["function"]["arguments"] = {"at": number}
        reply = Reply(completion_id=f"c{number}", token_ids=model.ids_of(sampled), message=answer, own_ids=(own,))
        forest.record(prompt, [reply])
        talk += [answer, result(f"ours{number}")]
    text = model.text_of(forest.plan(talk, [TOOL], normalise=as_it_is).path(), has_ended=False)
    assert text.count("## Return of functions.look:0") == 2
    assert "## Return of ours" not in text


@pytest.mark.parametrize(
    ("family", "written"), [("mistral", '"call_id": "'), ("kimi_k2", "Return of functions.look:0")]
)
def test_ids_that_the_client_made_have_the_templates_form(
    families: dict[str, Renderer], family: str, written: str
) -> None:
    model = families[family] if family in families else real(family)
    text = prompt_of(model, says("user", "x"), calls("toolu_01ABCDEFG"), result("toolu_01ABCDEFG"), tools=[TOOL])
    assert written in text
    assert "toolu" not in text.replace('"at": "toolu_01ABCDEFG"', "").replace("saw toolu_01ABCDEFG", "")


def test_a_template_without_tools_writes_them_in_the_named_format() -> None:
    model = Renderer(train_tokenizer(PLAIN, CHATML_FAMILY), tool_format=ToolFormat.HERMES)
    asked = (says("user", "x"), calls("a"), result("a"))
    text = prompt_of(model, *asked, tools=[TOOL])
    assert json.dumps(TOOL) in text.partition("<|im_start|>user")[0]
    assert '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call><|im_end|>' in text
    tokenizer = train_tokenizer(model.chat_template, CHATML_FAMILY)
    assert tokenizer.apply_chat_template(list(asked), tools=[TOOL], tokenize=False, add_generation_prompt=True) == text
    assert not Renderer(tokenizer).is_derived  # a checkpoint's template is taken as it is


def test_a_tool_needs_no_description() -> None:
    assert "look" in prompt_of(real("gpt_oss"), says("user", "x"), tools=[TOOL])


def test_a_refusal_names_the_message() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\] .*No user query found") as caught:
        prompt_of(real("qwen35"), says("system", "x"))
    assert caught.value.param == "messages[0]"


def test_a_template_sees_the_text_that_was_sent() -> None:
    """Qwen3.5 takes a question that looks like a tool's response for one, and keeps the thinking before it."""
    model, forest = real("qwen35"), Forest(real("qwen35"))
    talk = [says("user", "x")]
    for number in range(6):
        prompt = forest.plan(list(talk), (), normalise=as_it_is)
        answer = says("assistant", f"print({number})", reasoning_content="Hm.")
        ids = model.ids_of(f"Hm.\n</think>\n\nprint({number})<|im_end|>")
        assert (
            forest.record(prompt, [Reply(completion_id=f"c{number}", token_ids=ids, message=answer, has_thinking=True)])
            is None
        )
        talk += [answer, says("user", f"<tool_response>\n{number}<|im_end|>\n</tool_response>")]
    assert forest.audit() == 0
    assert prompt.path().count(model.end_token_id) == 11  # none of them is from a message


def test_what_stands_for_stripped_thinking_is_the_templates() -> None:
    model, forest = real("glm_47"), Forest(real("glm_47"))
    prompt = forest.plan([says("user", "q")], (), normalise=as_it_is)
    answer = says("assistant", "Hello", reasoning_content="I think.")
    ids = model.ids_of("I think.</think>Hello<|user|>")
    forest.record(prompt, [Reply(completion_id="c1", token_ids=ids, message=answer, has_thinking=True)])
    following = forest.plan([says("user", "q"), answer, says("user", "n")], (), normalise=as_it_is)
    assert "<|assistant|></think>Hello<|user|>n" in model.text_of(following.path(), has_ended=False)
    forest.record(following, [])
    assert forest.audit() == 0


def test_results_of_calls_with_one_id_are_those_of_the_first_and_the_second() -> None:
    said = (
        says("user", "x"),
        calls("a", "a"),
        says("tool", "one", tool_call_id="a"),
        says("tool", "two", tool_call_id="a"),
    )
    kimi, gpt_oss = (prompt_of(real(name), *said, tools=[TOOL]) for name in ("kimi_k2", "gpt_oss"))
    assert "Return of functions.look:0\\none" in kimi
    assert "Return of functions.look:1\\ntwo" in kimi
    assert (gpt_oss.count("one"), gpt_oss.count("two")) == (1, 1)


@pytest.mark.parametrize("results", [["b"], ["a", "a", "b"]])
def test_a_result_that_would_be_read_as_another_calls_is_refused(results: list[str]) -> None:
    with pytest.raises(RequestError, match=r"messages\[\d\] is the result of a call"):
        prompt_of(real("qwen35"), says("user", "x"), calls("a", "b"), *map(result, results), tools=[TOOL])


def test_no_text_becomes_a_tag_of_kept_thinking(family_folders: dict[str, Path]) -> None:
    model = Renderer.load(family_folders["qwen3"], history_thinking=HistoryThinking.KEEP)
    plan = Forest(model).plan([says("user", "a<|thinking-from-here|>b")], (), normalise=as_it_is)
    assert model.ids_of("<think>")[0] not in plan.path()
