"""The rows of a fine-tuning:

1. a bad row is one line with its file, its number and the reason; 2. a row that is too long is refused, or left out and
counted, never cut; 3. what is held out is drawn by the seed, and is not learnt; 4. each epoch has every row once, in an
order of its own, and a resume goes on within it; 5. rollouts of a ledger are learnt by their sampled tokens, those of
enough reward alone, also greedy ones, but for answers that the agent never got; 6. images in rows are kept by their
digests, and become the tokens that the gateway makes of them; a row with a bad one is refused.
"""

import asyncio
import json
import shutil
from base64 import b64encode
from codecs import BOM_UTF8
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_agent.errors import ConfigError
from areal_agent.images import ImageFolder
from areal_agent.sft.config import SftConfig
from areal_agent.sft.data import Data, Row, load_data, read_chats, read_rollouts, split
from areal_agent.sft.sequences import Example
from areal_agent.tokens.renderer import Renderer, load_tokenizer
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings
from areal_agent.types import Rewards, SamplingParams, SessionPurpose
from tests.histories import begin_rollout, completion, end_rollout, open_ledger, session, trajectory, turn
from tests.vision import make_vision_model, picture

ASKED = {"role": "user", "content": "What is 1 + 1?"}
SAID = {"role": "assistant", "content": "The answer is 2."}
CHAT = {"messages": [ASKED, SAID]}


def calling(arguments: object, name: str = "python") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def config(folder: Path, **values: Any) -> SftConfig:
    return SftConfig.parse({"model": str(folder), "held_out": {"share": 0}, **values})


def written(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON: unexpected end of data"),
        ("[]", r"a row is an object with 'messages', not '\[\]'"),
        ({"message": []}, r"unknown key 'message'; did you mean 'messages'\?"),
        ({}, "'messages' is None; give a list of messages"),
        ({"messages": []}, r"'messages' is \[\]; give a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        ({"messages": [ASKED]}, "there is nothing to learn: no message of the assistant"),
        ({"messages": [ASKED, SAID | {"weight": 0}]}, "there is nothing to learn: .* all of weight 0"),
        ({"messages": [ASKED, SAID | {"weight": 2}]}, r"messages\[1\].weight is 2; it is 1, or 0"),
        (
            {"messages": [ASKED, SAID | {"wieght": 0}]},
            r"messages\[1\] has the unknown key 'wieght'; did you mean 'weight'\?",
        ),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, r"messages\[1\] says nothing"),
        ({"messages": [ASKED, {"role": "assistant", "content": "\n", "reasoning_content": ""}]}, "says nothing"),
        ({"messages": [ASKED, SAID], "tools": False}, "tools"),
        ({"messages": [ASKED, SAID], "tools": [{"type": "x"}]}, r"tools\[0\]"),
        (
            calling("{'code'"),
            r"messages\[1\].tool_calls\[0\].function.arguments is \"\{'code'\"; it must be a JSON object",
        ),
        (calling([1]), r"messages\[1\].tool_calls\[0\].function.arguments"),
        (calling({}, name=""), r"messages\[1\].tool_calls\[0\].function.name is ''; name the tool"),
        ({"messages": [ASKED, SAID | {"reasoning_content": "Hm."}]}, r"does not write messages\[1\].reasoning_content"),
    ],
)
def test_a_bad_row_is_named(small_model: Path, tmp_path: Path, row: object, reason: str) -> None:
    file = written(tmp_path / "chats.jsonl", CHAT, "", row, CHAT)
    with pytest.raises(ConfigError, match=rf"chats\.jsonl:3: .*{reason}"):
        load_data(config(small_model, data=str(file)), small_model, None)


def test_files_of_other_systems_are_read(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    exported = {"messages": [ASKED, SAID | {"refusal": None, "annotations": []}]}
    file.write_bytes(BOM_UTF8 + b"\r\n\r\n".join(json.dumps(one).encode() for one in (CHAT, exported)))
    first, second = read_chats(file)
    assert (first.origin, second.origin) == (f"{file}:1", f"{file}:3")
    assert list(first.messages) == list(second.messages) == [ASKED, SAID | {"weight": 1}]


@pytest.mark.parametrize("arguments", [{"n": 2**80}, json.dumps({"n": 2**80})], ids=["an object", "text"])
def test_arguments_are_read_exactly(tmp_path: Path, arguments: object) -> None:
    (chat,) = read_chats(written(tmp_path / "chats.jsonl", calling(arguments)))
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"n": 2**80}


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no rows"):
        read_chats(tmp_path / "empty.jsonl")


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read chats from '.*none\.jsonl': No such file"):
        read_chats(tmp_path / "none.jsonl")


def test_a_row_that_is_too_long_is_refused_or_left_out(small_model: Path, tmp_path: Path) -> None:
    long = {"messages": [ASKED, {"role": "assistant", "content": "2 " * 50}]}
    file = written(tmp_path / "chats.jsonl", CHAT, long)
    whole = load_data(config(small_model, data=str(file)), small_model, 512)
    limit = len(whole.rows[1].examples[0].token_ids) - 1
    with pytest.raises(
        ConfigError, match=rf"chats\.jsonl:2: a sequence of {limit + 1} tokens, and the model was made f"
    ):
        load_data(config(small_model, data=str(file)), small_model, limit)
    values = {"files": str(file), "max_tokens": limit, "too_long": "drop"}
    data = load_data(config(small_model, data=values), small_model, 512)
    assert (len(data.rows), data.num_too_long) == (1, 1)
    assert data.rows[0].examples[0].token_ids.tolist() == whole.rows[0].examples[0].token_ids.tolist()
    with pytest.raises(ConfigError, match="no row is left to learn after 2 rows that are too long"):
        load_data(config(small_model, data=values | {"max_tokens": 2}), small_model, 512)
    with pytest.raises(ConfigError, match=r"data\.max_tokens is 513, and the model was made for 512 tokens; lower it"):
        load_data(config(small_model, data=values | {"max_tokens": 513}), small_model, 512)


def test_a_sequence_larger_than_a_micro_batch_is_refused_where_that_is_asked(small_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "chats.jsonl", CHAT)
    trainer = {"tokens_per_micro_batch": 5, "oversized": "refuse"}
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1: .* does not fit into trainer\.tokens_per_micro_batch = 5"):
        load_data(config(small_model, data=str(file), trainer=trainer), small_model, None)


def rows(number: int) -> tuple[Row, ...]:
    """Rows of two tokens, of which the second has the row's number and is in the loss."""
    return tuple(
        Row(
            origin=f"f:{n}",
            examples=(Example(token_ids=np.array([0, n], dtype=np.int32), loss_mask=np.array([False, True])),),
        )
        for n in range(number)
    )


def test_a_share_is_held_out_by_the_seed() -> None:
    learnt, held_out = split(rows(40), 0.1, seed=3)
    assert (len(learnt), len(held_out)) == (36, 4)
    assert {one.origin for one in (*learnt, *held_out)} == {f"f:{n}" for n in range(40)}
    again, other = split(rows(40), 0.1, seed=3)[1], split(rows(40), 0.1, seed=4)[1]
    assert [one.origin for one in again] == [one.origin for one in held_out] != [one.origin for one in other]
    assert [len(part) for part in split(rows(2), 0.01, seed=0)] == [1, 1]


def test_each_epoch_has_every_row_once_and_a_resume_goes_on() -> None:
    data = Data(rows=rows(10), held_out=(), num_too_long=0)
    assert data.num_steps(epochs=1.5, batch_size=4) == 4  # 15 rows
    batches = [[int(one.token_ids[1]) for one in batch] for batch in islice(data.batches(4, seed=1), 5)]
    learnt = [number for batch in batches for number in batch]
    first, second = learnt[:10], learnt[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    resumed = [[int(one.token_ids[1]) for one in batch] for batch in islice(data.batches(4, 1, num_done=3), 2)]
    assert resumed == batches[3:]


def rollout(session_id: str, reward: float, **changes: Any) -> Any:
    """Four sampled tokens, 0 to 3, after the prompt 1 2."""
    only = turn(f"{session_id}-t", completion(f"{session_id}-c", [0, 0, 0, 0]), **changes)
    return trajectory(session_id, [0], reward, turns=(only,))


def template_of(model: Path) -> str:
    return Renderer.load(model).chat_template


@pytest.fixture
def run_dir(small_model: Path, tmp_path: Path) -> Path:
    """A ledger with rollouts of rewards 0, 1 (ten times 0.1) and 2; the last is greedy, one with 2 an evaluation."""

    async def fill() -> None:
        async with open_ledger(tmp_path) as ledger:
            await ledger.set_note(TRANSCRIPT_NOTE, TranscriptSettings(tokenizer=str(small_model)).note())
            for name, reward in (("bad", 0.0), ("good", 1.0), ("best", 2.0), ("unseen", 2.0)):
                await begin_rollout(ledger, name, "g")
                greedy = SamplingParams(temperature=0.0 if name == "best" else 0.7)
                one = rollout(name, reward, sampling=greedy)
                if name == "good":
                    one = replace(one, rewards=Rewards(by_completion={str(number): 0.1 for number in range(10)}))
                await end_rollout(ledger, replace(one, undelivered=("unseen-c",) if name == "unseen" else ()))
            await ledger.own.open_session(session("graded", purpose=SessionPurpose.EVAL))
            await end_rollout(ledger, rollout("graded", 2.0))

    asyncio.run(fill())
    return tmp_path


@pytest.mark.parametrize(("min_reward", "sessions"), [(1.0, ["best", "good"]), (2.0, ["best"])])
def test_rollouts_are_learnt_by_their_sampled_tokens(
    small_model: Path, run_dir: Path, min_reward: float, sessions: list[str]
) -> None:
    found = read_rollouts(run_dir, min_reward, small_model, template_of(small_model))
    assert [row.origin for row in found] == [f"session {one}" for one in sessions]
    (record,) = found[0].records()
    assert record.token_ids.tolist() == [1, 2, 0, 1, 2, 3]
    assert record.loss_mask.tolist() == [False, False, True, True, True, True]
    assert record.temperatures.tolist() == [1.0] * 6


def test_rollouts_that_are_too_bad_or_of_another_tokenizer_are_refused(
    small_model: Path, run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no rollout of .* has a reward of 3 or more; lower data.min_reward"):
        read_rollouts(run_dir, 3.0, small_model, template_of(small_model))
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"and the model in .* has another; give a model with that tokenizer"):
        read_rollouts(run_dir, 1.0, other, template_of(small_model))


def test_rollouts_of_another_chat_template_are_refused(small_model: Path, run_dir: Path, tmp_path: Path) -> None:
    other = shutil.copytree(small_model, tmp_path / "other")
    (other / "chat_template.jinja").write_text(template_of(small_model).replace("<|im_end|>", "<|im_end|>\n"))
    values = {"from_run": str(run_dir), "min_reward": 1.0}
    with pytest.raises(ConfigError, match=r"another chat template than the model .*; set history_thinking as that"):
        load_data(config(other, data=values), other, None)


def test_images_of_rows_are_learnt_as_the_gateway_shows_them(tmp_path: Path) -> None:
    folder, images = make_vision_model(tmp_path / "model"), ImageFolder(tmp_path / "images")
    red, blue = picture("red"), picture("blue", size=(140, 56))
    (tmp_path / "blue.png").write_bytes(blue)
    inline = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(red).decode()}"}}
    texts = [{"type": "text", "text": one} for one in ("red", "blue")]
    asked = {"role": "user", "content": [texts[0], inline, texts[1], {"type": "image", "path": "blue.png"}]}
    drawing = calling({"type": "image", "path": "no.png"}, name="draw")  # a call's arguments, and no part
    values = config(folder, data=str(written(tmp_path / "chats.jsonl", {"messages": [asked, SAID]}, drawing)))
    (example,) = load_data(values, folder, None, images).rows[0].examples
    assert [one.end - one.start for one in example.images] == [4, 10]
    assert [images.read(one.digest) for one in example.images] == [red, blue]
    pads = [one for span in example.images for one in range(span.start, span.end)]
    assert np.flatnonzero(example.token_ids == 5).tolist() == pads
    text = load_tokenizer(folder).decode(example.token_ids)
    assert text.count("<|vision_start|><|image_pad|>") == text.count("<|image_pad|><|vision_end|>") == 2
    outside = "nothing is fetched; put its file, no link to it, into the folder of the rows"
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "link.png").symlink_to(tmp_path / "blue.png")
    for part, reason in (
        ({"type": "image", "path": "green.png"}, r"green\.png', which cannot be read .*; correct it, or give"),
        ({"type": "image", "path": "../blue.png"}, outside),
        ({"type": "image", "path": str(tmp_path / "blue.png")}, outside),
        ({"type": "image", "path": "link.png"}, outside),
        ({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}, outside),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "no PNG, JPEG or WebP file"),
    ):
        file = written(tmp_path / "rows" / "bad.jsonl", {"messages": [{"role": "user", "content": [part]}, SAID]})
        with pytest.raises(ConfigError, match=rf"bad\.jsonl:1: .*{reason}"):
            load_data(config(folder, data=str(file)), folder, None, images)
    file.write_text(file.read_text().replace('"image', r'"\u0069mage'))
    with pytest.raises(ConfigError, match="no PNG, JPEG or WebP file"):
        load_data(config(folder, data=str(file)), folder, None, images)
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1: messages\[0\]"):
        load_data(values, folder, None)
