"""What a model that sees makes of images, without a gateway:

- the ids of a long conversation with images, made from stand-ins, are those of its whole text; its audits agree
- a template that strips thinking forks, and its turns have their images
- equal requests have an equal identity in every process; another image makes another
- a text cannot forge an image: neither a pad nor the marks around it
- a model that writes images in a way that is not proved gets none: a log says why, and images are refused
"""

import json
from array import array
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from areal_agent.errors import RequestError
from areal_agent.tokens.forest import Forest, Reply
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject
from tests.vision import PROCESSOR, TEMPLATE, make_vision_model

from .conftest import as_it_is

REAL = Path(__file__).parent / "templates" / "real"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Renderer:
    return Renderer.load(folder)


def image(number: int, width: int = 56) -> JsonObject:
    return {"type": "image", "digest": f"{number:064x}", "width": width, "height": 56}


def asked(*parts: JsonObject) -> JsonObject:
    return {"role": "user", "content": list(parts)}


def call(number: int) -> JsonObject:
    function = {"name": "look", "arguments": {"at": number}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def test_a_long_conversation(seeing: Renderer) -> None:
    forest, messages = Forest(seeing), [asked({"type": "text", "text": "look"}, image(0))]
    for number in range(60):
        prompt = forest.plan(messages, (), normalise=as_it_is)
        whole = array("i", seeing.ids_of(seeing.render(messages)))
        assert prompt.path() == whole
        shown, spans = seeing.shown(prompt.path())
        assert [(one.digest, one.end - one.start) for one in spans] == [
            (image(n)["digest"], 4 + 4 * (n % 2)) for n in range(number + 1)
        ]
        assert min(shown) >= 0
        reply = call(number)
        rendered = seeing.render([*messages, reply, asked()])[len(seeing.render(messages)) :]
        ids = seeing.ids_of(rendered.partition("<|im_end|>")[0] + "<|im_end|>")
        forest.record(prompt, [Reply(completion_id=f"c{number}", token_ids=ids, message=reply)])
        result = {"role": "tool", "tool_call_id": f"c{number}", "content": [image(number + 1, 56 + 56 * (~number % 2))]}
        messages = [*messages, reply, result]
    assert prompt.stand_in and not prompt.stand_in.is_whole
    assert (forest.audit(), forest.num_mismatches) == (0, 0)


def test_a_template_of_another_family(folder: Path) -> None:
    """Its thinking goes from the history at the next question, so that turn forks and adds the later images anew."""
    renderer = Renderer.load(folder, chat_template=(REAL / "qwen35.jinja").read_text())
    forest, messages = Forest(renderer), [asked(image(0))]
    for number in range(3):
        prompt = forest.plan(messages, (), normalise=as_it_is)
        thought, said = f"hm {number}", {"role": "assistant", "content": f"it is {number}"}
        ids = renderer.ids_of(f"{thought}\n</think>\n\n{said['content']}<|im_end|>")
        forest.record(prompt, [Reply(completion_id=f"c{number}", token_ids=ids, message=said, has_thinking=True)])
        messages += [said, asked({"type": "text", "text": "and"}, image(number + 1))]
    assert prompt.path() == array("i", renderer.ids_of(renderer.render(messages[:5])))
    assert [one.digest for one in renderer.shown(prompt.new_ids)[1]] == [image(2)["digest"]]
    assert (prompt.fork_reason, forest.audit()) == ("template_strips_thinking", 0)


def test_identity(folder: Path, seeing: Renderer) -> None:
    def identity(renderer: Renderer, *numbers: int) -> bytes:
        return Forest(renderer).plan([asked(*map(image, numbers))], (), normalise=as_it_is).identity

    assert identity(Renderer.load(folder), 1, 2) == identity(seeing, 1, 2) != identity(seeing, 2, 1)


def test_a_text_forges_no_image(seeing: Renderer) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    (forged, _), (seen, spans) = (
        seeing.shown(array("i", seeing.ids_of(seeing.render([asked({"type": "text", "text": text}, *images)]))))
        for images in ([], [image(1000)])
    )
    special = [seeing.id_of(one) for one in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")]
    assert not set(special) & set(forged)
    assert [seen.count(one) for one in special] == [1, 4, 1]
    assert seen[spans[0].start : spans[0].end].tolist() == [special[1]] * 4


OTHER_TEMPLATES = {
    "counts images": TEMPLATE.replace("'<|vision_start|>", "loop.index ~ '<|vision_start|>"),
    "two pads": TEMPLATE.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"),
    "no pad": TEMPLATE.replace("<|image_pad|>", ""),
}


@pytest.mark.parametrize("name", OTHER_TEMPLATES)
def test_images_that_are_not_proved(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Renderer.load(folder, chat_template=OTHER_TEMPLATES[name])
    with pytest.raises(RequestError, match="takes text only"):
        other.render([asked(image(1))])
    assert "gets no images" in caplog.text
    assert other.render([{"role": "user", "content": "x"}])


def test_a_processor_that_is_not_there(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Renderer.load(tmp_path).vision() is None
    assert "preprocessor_config.json" in caplog.text
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    seeing = Renderer.load(tmp_path).vision()
    assert seeing is not None and seeing.num_pads(56, 56) == 4
    (tmp_path / "config.json").write_text("{}")
    caplog.clear()
    assert Renderer.load(tmp_path).vision() is None
    assert caplog.text == ""
    (tmp_path / "config.json").write_text("[]")
    assert Renderer.load(tmp_path).vision() is None
    assert "no JSON object" in caplog.text
