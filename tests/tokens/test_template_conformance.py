"""Every shape of conversation on the templates of this folder, and random plays (`conformance --templates`):

- each shape is exact, placed elsewhere, or refused with its place; so is each random play
- the suite sees a text that the template does not write, at the first place; white space of an answer is no difference
- a play that fails is told as the smallest one that fails in the same way
- control texts of a template are tokens of the tokenizer that is made for it
- the command prints a table and ends with 0, or with 1 and the faults; it says where there is no template
"""

from functools import cache
from pathlib import Path

import pytest

from areal_agent.conformance.__main__ import main
from areal_agent.conformance.playing import Verdict, played
from areal_agent.conformance.shapes import SHAPES, Play
from areal_agent.conformance.table import try_at_random, try_shape
from areal_agent.conformance.templates import Subject, make_tokenizer, templates_at_hand
from areal_agent.errors import ConfigError
from areal_agent.tokens.renderer import Renderer
from tests.tokens.conftest import CHATML, TEMPLATES

WITHOUT_A_FORM = {
    ("real/deepseek_r1", "DIFFERS"),  # U A1 U Amb1 U: a second call is written as part of the first one's answer
    ("deepseek_r1_distill", "DIFFERS"),  # the same
    ("step_35", "DIFFERS"),  # Ur Amb U: how it closes the thinking before an answer depends on the question's text
}
"""Templates and faults of random plays in which an answer is begun where the template has no form for such a one."""

QUICK = [shape for shape in SHAPES if shape.name != "many turns"]


@cache
def subjects() -> tuple[Subject, ...]:
    return tuple(Subject(name, tokenizer) for name, tokenizer in templates_at_hand([TEMPLATES]))


@pytest.mark.parametrize("shape", QUICK, ids=lambda shape: shape.name)
def test_nothing_is_left_out(shape: Play) -> None:
    client, *sampled = shape.variants()
    found = [(subject.name, played(subject, play)) for subject in subjects() for play in (client, *sampled[-1:])]
    assert [(name, str(finding)) for name, finding in found if finding.verdict.is_fault] == []


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_nothing_is_left_out_without_thinking(shape: Play) -> None:
    found = [(subject.name, try_shape(subject, shape)) for subject in subjects()]
    assert [(name, str(finding)) for name, finding in found if finding.verdict.is_fault] == []


def test_random_plays() -> None:
    assert try_at_random(subjects(), num_plays=105, seed=0) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gemma_4", "U Ahm1 R1 Am S A U"),  # the client's own answer behind the model's
        ("deepseek_r1_distill", "U Am3 A2 U"),  # the same, where two calls look like one answer
        ("real/deepseek_r1", "U Am2 Ah U Atm2 F U"),  # an answer of the session's behind an edited one
        ("mistral", "U A A1 R1 Am U"),  # a conversation in which the template takes no answer
        ("nemotron_3", "U Amdn1 R1 Am B2 U"),  # of two samples, the one that was sent back with new ids
    ],
)
def test_found_at_random(name: str, line: str) -> None:
    [subject] = (one for one in subjects() if one.name == name)
    finding = played(subject, Play(name="x", line=line))
    assert not finding.verdict.is_fault, str(finding)


@pytest.mark.full
def test_ten_thousand_random_plays() -> None:
    told = try_at_random(subjects(), num_plays=10_000, seed=1)
    assert [one for one in told if (one.split(": ")[0], one.split(": ")[2]) not in WITHOUT_A_FORM] == []


def subject(*, served: str, used: str) -> Subject:
    """Return a subject whose prompts come from another template than the one that transformers is given."""
    return Subject("x", make_tokenizer(served), Renderer(make_tokenizer(used)))


NEXT_TURN = CHATML.replace("message.role + '\\n'", "message.role + ('\\n' if loop.index0 < 2 else ' ')")


@pytest.mark.parametrize("line", ["T0 U A U", "T0 U Am U"])
def test_another_text_is_a_difference(line: str) -> None:
    finding = str(played(subject(served=CHATML, used=NEXT_TURN), Play(name="x", line=line)))
    assert finding.startswith("DIFFERS: ")
    assert " Say Mark102x now." in finding and "\\nSay Mark102x now." in finding


def test_what_was_sampled_may_have_other_white_space() -> None:
    trimmed = CHATML.replace("message.content", "message.content | trim")
    assert played(subject(served=trimmed, used=trimmed), Play(name="x", line="U Amp U")).verdict is Verdict.EXACT


def test_a_failing_play_is_told_as_small_as_it_fails() -> None:
    [told] = try_at_random([subject(served=CHATML, used=NEXT_TURN)], num_plays=20, seed=0)
    assert len(told.split(": ")[1].split()) <= 3
    assert ": DIFFERS: " in told


def test_control_texts_are_tokens() -> None:
    tokenizer = make_tokenizer("{{ '<|im_start|>[INST]<tool_call>' }}{{ '<｜User｜>' if '<other>' }}")
    assert tokenizer.tokenize("<|im_start|>[INST]<tool_call><｜User｜>") == [
        "<|im_start|>",
        "[INST]",
        "<tool_call>",
        "<｜User｜>",
    ]
    assert len(tokenizer.tokenize("<other>")) > 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    assert main(["--templates", str(tmp_path), "--plays", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| shape | exact | placed elsewhere | refused |"
    assert "| two users | all |  |  |" in lines
    assert lines[-1] == f"no faults: 1 templates, {len(SHAPES)} shapes, 10 random plays"


def test_the_command_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template; give a model's folder"):
        main(["--templates", str(tmp_path)])
