"""Runs for the tests of `view`: sessions of text, recorded as a gateway with the small model's tokenizer does."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings
from areal_agent.types import Completion, Distribution, ForkReason, ImageSpan, Rewards, Turn
from tests import histories
from tests.vision import picture

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202ereversed\u2066\r\x08\nturn 9\n\u200b\ud7ff\u00e9 \u05d0"
CALL = '<tool_call>{"name": "python", "arguments": {"code": "a = 2\\nprint(a + 2)"}}</tool_call>'
QUESTION = {"role": "user", "content": "What is 2 + 2?"}


class Recorder:
    """Records sessions of text in a ledger, as a gateway with the small model's tokenizer does."""

    def __init__(self, ledger: Ledger, model: Path) -> None:
        self.ledger = ledger
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def turn(self, name: str, role: str, content: str, answer: str, parent: str | None = None, **changes: Any) -> Turn:
        token_ids = self.ids(f"{answer}<|im_end|>")
        versions = (0,) * (len(token_ids) - 1) + (1,)
        made: Completion = histories.completion(
            f"{name}-c", versions, token_ids=token_ids, **changes.pop("completion", {})
        )
        prompt = self.ids(f"\n<|im_start|>{role}\n{content}<|im_end|>\n<|im_start|>assistant\n")
        fields = {"parent": parent, "new_prompt_ids": prompt, "request_delta": ({"role": role, "content": content},)}
        return histories.turn(name, made, **(fields | changes))

    async def session(self, name: str, *turns: Turn, ends: bool = True, **changes: Any) -> None:
        started = {key: changes.pop(key) for key in ("group_id", "purpose", "started_s", "task_id") if key in changes}
        await self.ledger.own.open_session(histories.session(name, **started))
        for turn in turns:
            await self.ledger.own.append_turn(name, turn)
        if ends:
            fields = {key: started[key] for key in started if key != "purpose"} | {"ended_s": 9.0}
            await self.ledger.own.close_session(histories.trajectory(name, (), 1.0, **(fields | changes)))


async def look(folder: Path, model: Path) -> str:
    """Record a run with the session `look`, whose tool shows a picture of four tokens; return the picture's digest."""
    digest, pads = ImageFolder(folder / IMAGES).keep(picture("red")), (7, 7, 7, 7)
    async with histories.open_ledger(folder) as ledger:
        await ledger.set_note(TRANSCRIPT_NOTE, TranscriptSettings(tokenizer=str(model)).note())
        recorder = Recorder(ledger, model)
        before, after = recorder.ids("\n<|im_start|>tool\nDone"), recorder.ids("<|im_end|>\n<|im_start|>assistant\n")
        shown = {"type": "image_url", "image_url": {"url": f"sha256:{digest}"}}
        said = {"role": "tool", "content": [{"type": "text", "text": "Done"}, shown]}
        turn = recorder.turn(
            "look-1", "tool", "", "It is red.", new_prompt_ids=(*before, *pads, *after), request_delta=(said,),
            images=(ImageSpan(digest=digest, start=len(before), end=len(before) + 4),),
        )  # fmt: skip
        await recorder.session("look", turn)
    return digest


async def talk(recorder: Recorder) -> None:
    """Record the group g0: a rollout with a call, a branch and a new conversation, and one whose reward is 0."""
    first = recorder.turn("t1", "user", "What is 2 + 2?", f"Let me see. {CALL}")
    second = recorder.turn(
        "t2", "tool", "4", "<think>\nIt is 4.\n</think>\n\nThe answer is 4.", "t1-c", fork_at=7,
        completion={"distribution": Distribution.ALTERED},
    )  # fmt: skip
    edited = recorder.turn("t3", "tool", "5", "It is 5.", "t1-c", fork_at=7, fork_reason=ForkReason.EDITED)
    again = recorder.turn(
        "t4", "user", "", "It is 6.",
        request_delta=(QUESTION, {"role": "user", "content": "Really?"}), fork_reason=ForkReason.NEW_CONVERSATION,
    )  # fmt: skip
    rewards = Rewards(final=0.5, by_completion={"t2-c": 0.25}, parts={"format": 1.0})
    await recorder.session("g0-0", first, second, edited, again, group_id="g0", rewards=rewards, logged={"tries": 2})
    await recorder.session("g0-1", recorder.turn("t5", "user", "What is 2 + 2?", "5"), group_id="g0",
                           rewards=Rewards(final=0.0))  # fmt: skip
    await recorder.ledger.lease(1, [Lease.of(await recorder.ledger.trajectory("g0-0"), 30)])
    await recorder.ledger.commit_checkpoint(1, "checkpoints/1")
