"""Stand-ins for long conversations:

- a cut leaves the head with the first question, the last four messages, and neighbours of the same kinds
- a conversation without a period is not cut
- a turn's text is made from a bounded number of messages, and each message is normalised once
- an audit catches a template whose text depends on what was cut: the turn becomes a root, it is counted, and nothing is
  cut any more; an audit at the end finds it too
- a template that refuses the short form is rendered whole
- a conversation of 128 turns is held in less than a megabyte
"""

import gc
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from areal_agent.tokens.forest import FIRST_AUDIT, Forest, Prompt, Reply
from areal_agent.tokens.prompt import MAX_MESSAGES, longest_cut
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason, JsonObject

# Writes the number of each result, which differs in stand-ins.
NUMBERS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' ~ (loop.index if m.role == 'tool' else '') ~ m.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""

# Refuses a conversation whose second result is missing, as no whole one is.
REFUSES = """\
{%- for m in messages %}
{%- if m.content == 'odd' and messages[4].content != 'x3' %}{{- raise_exception('where is x3?') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""


class Session:
    """A tool loop that answers itself."""

    def __init__(self, renderer: Renderer) -> None:
        self.forest = Forest(renderer)
        self.renderer = renderer
        self.messages: list[JsonObject] = [{"role": "user", "content": "go"}]
        self.num_normalised = 0
        self.reasons: list[ForkReason | None] = []

    def normalise(self, message: JsonObject, index: int) -> JsonObject:
        self.num_normalised += 1
        return message

    def turn(self, result: str = "x") -> Prompt:
        prompt = self.forest.plan(list(self.messages), (), normalise=self.normalise)
        number = len(self.messages)
        said = {"role": "assistant", "content": f"step {number}"}
        ids = (*self.renderer.ids_of(f"step {number}"), self.renderer.end_token_id)
        reply = Reply(completion_id=f"c{number}", token_ids=ids, message=said)
        self.reasons.append(self.forest.record(prompt, [reply]))
        self.messages += [said, {"role": "tool", "content": f"{result}{number}" if result == "x" else result}]
        return prompt


def renderer_of(tokenizer: PreTrainedTokenizerFast, template: str, folder: Path) -> Renderer:
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Renderer.load(folder)


kinds = st.sampled_from(["user", "assistant", "tool", "calls"])


def kind_of(kind: str) -> tuple[str, bool]:
    return ("assistant", True) if kind == "calls" else (kind, False)


@given(kinds=st.lists(kinds, min_size=1, max_size=40))
def test_a_cut_leaves_a_conversation_of_the_same_shape(kinds: list[str]) -> None:
    found = longest_cut([kind_of(kind) for kind in kinds])
    if found is None:
        return
    start, end = found
    assert 0 < start < end <= len(kinds) - 4
    assert (kinds[start - 1], kinds[start]) == (kinds[end - 1], kinds[end])
    assert "user" in kinds[:start] or "user" not in kinds
    assert kinds[start] != "tool"


@pytest.mark.parametrize("period", [["calls", "tool"], ["assistant", "user"], ["calls", "tool", "tool"]])
def test_periods_are_cut(period: list[str]) -> None:
    messages = [kind_of(kind) for kind in ["system", "user", *period * 8]]
    found = longest_cut(messages)
    assert found is not None
    assert (found[1] - found[0]) % len(period) == 0
    assert len(messages) - (found[1] - found[0]) <= 2 + 3 * len(period) + 2


def test_without_a_period_nothing_is_cut() -> None:
    assert longest_cut([kind_of(kind) for kind in ["user", "calls"] + ["tool"] * 20]) is None


def test_the_work_of_a_turn_is_bounded(renderer: Renderer) -> None:
    session = Session(renderer)
    for number in range(60):
        before = session.num_normalised
        prompt = session.turn()
        assert prompt.stand_in is not None
        assert len(prompt.stand_in.messages) <= MAX_MESSAGES + 2
        is_audited = prompt.depth in (FIRST_AUDIT * 2**n for n in range(5))
        num_new = 2 if number else 1
        assert session.num_normalised - before == (num_new + len(prompt.messages()) if is_audited else num_new)
    assert session.reasons == [None] * 60
    assert session.forest.audit() == 0
    assert list(prompt.path()) == renderer.ids_of(renderer.render(session.messages[:-2]))


def test_a_template_that_counts_is_caught_and_everything_is_rendered(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    renderer = renderer_of(tokenizer, NUMBERS, tmp_path)
    first, second = Session(renderer), Session(renderer)
    for _ in range(FIRST_AUDIT):
        prompt = first.turn()
    assert first.reasons[-1] is ForkReason.TEMPLATE_REWRITES_HISTORY
    assert first.forest.num_mismatches == 1
    assert not renderer.may_elide
    assert list(prompt.path()) == renderer.ids_of(renderer.render(first.messages[:-2]))
    for _ in range(FIRST_AUDIT + 4):
        prompt = second.turn()
        assert list(prompt.path()) == renderer.ids_of(renderer.render(second.messages[:-2]))
    assert second.reasons == [None] * (FIRST_AUDIT + 4)


def test_the_audit_at_the_end_finds_it_too(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    session = Session(renderer_of(tokenizer, NUMBERS, tmp_path))
    for _ in range(FIRST_AUDIT - 1):
        session.turn()
    assert session.forest.audit() == 1
    assert not session.renderer.may_elide


def test_a_short_form_that_is_refused_is_no_error(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    session = Session(renderer_of(tokenizer, REFUSES, tmp_path))
    for number in range(16):
        prompt = session.turn("odd" if number > 8 else "x")
        assert list(prompt.path()) == session.renderer.ids_of(session.renderer.render(session.messages[:-2]))
    assert session.reasons == [None] * 16


def test_a_long_conversation_is_held_in_little(renderer: Renderer) -> None:
    session = Session(renderer)
    session.turn()
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(128):
            session.messages[-1] = {"role": "tool", "content": f"{number:0400}"}
            session.turn()
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 1_000_000
