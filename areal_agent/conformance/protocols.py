"""The same episodes through every protocol of a gateway give the same records.

::

    episodes ──▶ Chat ───────────────▶ /v1/chat/completions ─┐
             ├─▶ Responses ──────────▶ /v1/responses ────────┼─▶ sessions ─▶ /export_trajectories ─▶ difference
             ├─▶ Responses, by id ───▶ /v1/responses ────────┤
             └─▶ Messages ───────────▶ /v1/messages ─────────┘

An episode (`protocols.json`) is written once, as what a client says. A dialect puts it into the form of a protocol
and sends the real answers back as that protocol's clients do. Each play is a session of its own with the same seed,
greedy, and for evaluation, so that nothing is trained. Then the ledger's records are compared with chat completions'.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import orjson

from areal_agent.errors import GatewayError
from areal_agent.types import JsonObject

DATA: JsonObject = orjson.loads(Path(__file__).with_suffix(".json").read_bytes())

# ------------------------------------------------------------------------------------------------------ protocols


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A model's answer. `echo` is what the protocol's clients send back for it; `talk` is what it answered."""

    id: str
    echo: Sequence[JsonObject]
    call_ids: Sequence[str]
    talk: "Talk"


Talk = tuple[JsonObject | Answer, ...]
"""A conversation: answers, and messages with `role` and `content`; a tool's have `call_id` and `is_error`, too."""


class Dialect(Protocol):
    """The form of a protocol's requests and answers, and of answers that are sent back."""

    name: str
    path: str
    limit: str  # the parameter that limits an answer's tokens

    def body(self, talk: Talk, system: str | None, tools: Sequence[JsonObject], *, must_call: bool) -> JsonObject: ...

    def assembled(self, events: Sequence[JsonObject]) -> JsonObject:
        """Put events together to an answer, as far as `echo` reads it; its id is in the first event."""
        ...

    def echo(self, answer: JsonObject) -> tuple[Sequence[JsonObject], Sequence[str]]:
        """Return an answer as it is sent back, and the ids of its calls."""
        ...


class Chat:
    """Messages and answers as the talk has them."""

    name, path, limit = "chat", "/v1/chat/completions", "max_tokens"

    def body(self, talk: Talk, system: str | None, tools: Sequence[JsonObject], *, must_call: bool) -> JsonObject:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [item for one in talk for item in (one.echo if isinstance(one, Answer) else [self._message(one)])]
        functions = [{"type": "function", "function": tool} for tool in tools]
        return {"messages": messages, "tools": functions, "tool_choice": "required" if must_call else None}

    def _message(self, said: JsonObject) -> JsonObject:
        is_result = said["role"] == "tool"
        return {"role": "tool", "tool_call_id": said["call_id"], "content": said["content"]} if is_result else said

    def assembled(self, events: Sequence[JsonObject]) -> JsonObject:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for delta in (choice["delta"] for event in events for choice in event["choices"]):
            for name in delta.keys() & {"content", "reasoning_content"}:
                message[name] = (message.get(name) or "") + (delta[name] or "")
            for piece in delta.get("tool_calls") or ():
                calls: list[Any] = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, text in piece["function"].items():
                    calls[piece["index"]]["function"][name] += text or ""
        return {"id": events[0]["id"], "choices": [{"message": message}]}

    def echo(self, answer: JsonObject) -> tuple[Sequence[JsonObject], Sequence[str]]:
        message = answer["choices"][0]["message"]
        return [message], [call["id"] for call in message.get("tool_calls") or ()]


class Responses:
    """The whole talk as `input`, or, `by_id`, what is new after an earlier answer's id."""

    path, limit = "/v1/responses", "max_output_tokens"

    def __init__(self, *, by_id: bool = False) -> None:
        self.name = "previous_response_id" if by_id else "responses"
        self._by_id = by_id

    def body(self, talk: Talk, system: str | None, tools: Sequence[JsonObject], *, must_call: bool) -> JsonObject:
        functions = [{"type": "function", **tool} for tool in tools]
        body: dict[str, Any] = {"instructions": system, "tools": functions, "store": self._by_id}
        body["tool_choice"] = "required" if must_call else None
        for index, one in reversed(list(enumerate(talk)) if self._by_id else []):
            if isinstance(one, Answer) and one.talk == talk[:index]:
                body["previous_response_id"], talk = one.id, talk[index + 1 :]
                break
        items = [item for one in talk for item in (one.echo if isinstance(one, Answer) else [self._item(one)])]
        return body | {"input": items}

    def _item(self, said: JsonObject) -> JsonObject:
        match said["role"]:
            case "tool":
                return {"type": "function_call_output", "call_id": said["call_id"], "output": said["content"]}
            case "user":
                return {"role": "user", "content": [{"type": "input_text", "text": said["content"]}]}
            case _:
                return said

    def assembled(self, events: Sequence[JsonObject]) -> JsonObject:
        return events[-1]["response"]

    def echo(self, answer: JsonObject) -> tuple[Sequence[JsonObject], Sequence[str]]:
        items = answer["output"]
        return items, [item["call_id"] for item in items if item["type"] == "function_call"]


class Messages:
    """Content blocks; results, and what the user says after them, share a message."""

    name, path, limit = "messages", "/v1/messages", "max_tokens"

    def body(self, talk: Talk, system: str | None, tools: Sequence[JsonObject], *, must_call: bool) -> JsonObject:
        messages: list[Any] = []
        last = None
        for one in talk:
            role = "assistant" if isinstance(one, Answer) or one["role"] == "assistant" else "user"
            blocks = list(one.echo) if isinstance(one, Answer) else [self._block(one)]
            if role == "user" and last == "tool":
                messages[-1]["content"] += blocks
            else:
                messages.append({"role": role, "content": blocks})
            last = role if isinstance(one, Answer) else one["role"]
        schemas = [{"input_schema" if key == "parameters" else key: tool[key] for key in tool} for tool in tools]
        choice = {"type": "any"} if must_call else None
        return {"messages": messages, "system": system, "tools": schemas, "tool_choice": choice}

    def _block(self, said: JsonObject) -> JsonObject:
        if said["role"] != "tool":
            return {"type": "text", "text": said["content"]}
        block = {"type": "tool_result", "tool_use_id": said["call_id"], "content": said["content"]}
        return block | ({"is_error": True} if said["is_error"] else {})

    def assembled(self, events: Sequence[JsonObject]) -> JsonObject:
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "partial_json": ""})
            elif event["type"] == "content_block_delta":
                (name, text) = next((name, text) for name, text in event["delta"].items() if name != "type")
                blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + text
        for block in blocks:
            arguments = block.pop("partial_json")
            if block["type"] == "tool_use":
                block["input"] = orjson.loads(arguments or "{}")
        return {"id": events[0]["message"]["id"], "content": blocks}

    def echo(self, answer: JsonObject) -> tuple[Sequence[JsonObject], Sequence[str]]:
        blocks = answer["content"]
        return blocks, [block["id"] for block in blocks if block["type"] == "tool_use"]


DIALECTS: tuple[Dialect, ...] = (Chat(), Responses(), Responses(by_id=True), Messages())

# -------------------------------------------------------------------------------------------------------- playing


@dataclass(kw_only=True, slots=True)
class Play:
    """An episode as it was played through one protocol."""

    sent: list[str] = field(default_factory=list[str])  # the id of the answer to each request
    cut: set[str] = field(default_factory=set[str])  # those whose client hung up
    talks: list[Talk] = field(default_factory=lambda: [()])  # the talk after so many asks
    fields: set[str] = field(default_factory=set[str])  # of whole answers
    refused: str | None = None  # what the gateway said of the request that ended the play
    records: list[JsonObject | None] = field(default_factory=list[JsonObject | None])  # facts by name, of each request

    @property
    def num_calls(self) -> int:
        return sum(len(talk[-1].call_ids) for talk in self.talks if talk and isinstance(talk[-1], Answer))

    def __str__(self) -> str:
        num_sampled = sum(len(record[SAMPLED]) for record in self.records if record)
        refused = f"; then refused: {self.refused}" if self.refused else ""
        return f"{len(self.sent)} requests, {self.num_calls} calls, {num_sampled} sampled tokens{refused}"


class _Refused(GatewayError):
    """The answer to a request that the gateway will not take, such as one that the model's template refuses."""


class Player:
    """Plays episodes at one gateway. Its calls raise GatewayError when the gateway fails, or is gone."""

    def __init__(self, http: aiohttp.ClientSession, url: str, admin_key: str, *, seed: int, max_tokens: int) -> None:
        self._http = http
        self.url = url.rstrip("/").removesuffix("/v1")
        self._admin_key = admin_key
        self._start = {"task_id": "conformance", "purpose": "eval", "seed": seed, "sampling": {"temperature": 0}}
        self._max_tokens = max_tokens

    async def play(self, episode: JsonObject, dialect: Dialect) -> Play:
        """Play an episode in a session of its own, and return what the ledger has of it."""
        play = Play()
        [session] = await self._send("/rl/start_session", self._admin_key, self._start)
        try:
            for ask in episode["asks"]:
                await self._ask(play, session["api_key"], episode, ask, dialect)
        except _Refused as refusal:
            play.refused = str(refusal)
        finally:
            await self._send("/rl/end_session", session["api_key"], {})
        exported = await self._send("/export_trajectories", self._admin_key, {"session_id": session["session_id"]})
        play.records = _records(exported[0]["trajectory"], play)
        return play

    async def _ask(self, play: Play, key: str, episode: JsonObject, ask: JsonObject, dialect: Dialect) -> None:
        talk = _extended(play.talks[ask.get("after", -1)], ask)
        tools = DATA["tools"] if episode.get("tools") else []
        body = dialect.body(talk, episode.get("system"), tools, must_call=bool(ask.get("must_call")))
        body = {name: value for name, value in body.items() if value is not None and value != []}
        body |= {"model": "default", dialect.limit: ask.get("max_tokens", self._max_tokens)}
        if ask.get("hang_up"):
            begun = await self._send(dialect.path, key, {**body, "stream": True}, max_events=1)
            play.sent.append(dialect.assembled(begun)["id"])
            play.cut.add(play.sent[-1])
        is_streamed, answer = ask.get("stream", False), dict[str, Any]()
        for _ in range(2 if ask.get("again") else 1):
            events = await self._send(dialect.path, key, {**body, "stream": is_streamed})
            answer = dialect.assembled(events) if is_streamed else events[0]
            play.fields.update(() if is_streamed else answer)
            play.sent.append(answer["id"])
        play.talks.append((*talk, Answer(answer["id"], *dialect.echo(answer), talk)))

    async def _send(self, path: str, key: str, body: JsonObject, *, max_events: int | None = None) -> list[JsonObject]:
        """Return the events of the answer, a whole one being one event. Hang up after `max_events`."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        events: list[JsonObject] = []
        try:
            async with self._http.post(self.url + path, data=orjson.dumps(body), headers=headers) as response:
                if response.status == 400:
                    raise _Refused((await response.json())["error"]["message"])
                if response.status != 200:
                    text = f"{self.url}{path} was answered with {response.status}: {_said(await response.text())}"
                    raise GatewayError(text)
                if response.content_type != "text/event-stream":
                    return [orjson.loads(await response.read())]
                async for line in response.content:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        events.append(orjson.loads(line[5:]))
                    if len(events) == max_events:
                        response.close()
                        break
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = str(error).replace(" ssl:default", "") or type(error).__name__
            raise GatewayError(
                f"no gateway answers at {self.url}: {cause}; start one with python -m areal_agent.gateway"
            ) from error
        if any(event.get("error") or event.get("type") == "error" for event in events):
            raise GatewayError(f"a stream of {path} ended with an error: {events[-1]}")
        return events


def _said(text: str) -> str:
    """Return the message of an error, or the text of what is no gateway's."""
    with suppress(ValueError, TypeError, KeyError):
        return orjson.loads(text)["error"]["message"]
    return f"{text:.200}"


def _extended(talk: Talk, ask: JsonObject) -> Talk:
    """Add what a client says. Where the model called nothing, results are said by the user."""
    last, said = talk[-1] if talk else None, list[JsonObject]()
    call_ids, texts = last.call_ids if isinstance(last, Answer) else (), ask.get("results", ())
    for index, call_id in enumerate(call_ids):
        text = texts[index % len(texts)] if texts else "skipped"
        said.append({"role": "tool", "call_id": call_id, "content": text, "is_error": ask.get("is_error", False)})
    if texts and not call_ids:
        said.append({"role": "user", "content": f"Result: {', '.join(texts)}"})
    return (*talk, *said, *({"role": role, "content": ask[role]} for role in ("assistant", "user") if role in ask))


# ------------------------------------------------------------------------------------------------------ comparing

PROMPT, SAMPLED, REASON = "prompt ids", "sampled ids", "fork reason"
FACTS = (PROMPT, "sampling", "parent", "length kept of the parent", REASON, SAMPLED, "end", "delivery")


def _records(trajectory: JsonObject, play: Play) -> list[JsonObject | None]:
    """Return the facts about each request, in the order of sending; None where nothing was recorded."""
    turns = {turn["completions"][0]["id"]: turn for turn in trajectory["turns"]}
    # What a request that was cut off has sampled, its retry samples too: to continue either is the same.
    number_of = {answer_id: index + 1 + (answer_id in play.cut) for index, answer_id in enumerate(play.sent)}
    paths: dict[str | None, list[int]] = {None: []}  # the prompt and the sampled ids of each answer
    records: dict[str, JsonObject] = {}
    for answer_id, turn in turns.items():
        completion, parent = turn["completions"][0], turn["parent"]
        prompt = paths[parent][: turn["fork_at"]] + turn["new_prompt_ids"]
        paths[answer_id] = prompt + completion["token_ids"]
        delivery = "lost" if answer_id in trajectory["undelivered"] else "made"
        place = (number_of.get(parent, "none"), turn["fork_at"], turn["fork_reason"] or "none")
        facts = (prompt, turn["sampling"], *place, completion["token_ids"], completion["finish_reason"], delivery)
        records[answer_id] = dict(zip(FACTS, facts, strict=True))
    return [records.get(answer_id) for answer_id in play.sent]


NOT_REPEATABLE = (
    "this engine does not sample the same twice, or the model's template writes the ids of calls, which are random"
)


def difference(play: Play, reference: Play) -> str | None:
    """Return the first difference from chat completions in plain words, or None.

    Of a stream that was cut off only the prompt is compared, since the rest depends on the moment. So does whether its
    retry is noted as `repeated`.
    """
    for index, (record, other) in enumerate(zip(play.records, reference.records, strict=False)):
        is_cut, is_retry = (i >= 0 and play.sent[i] in play.cut for i in (index, index - 1))
        if record is None or other is None:
            if is_cut:
                continue
            return f"request {index + 1} is not in the ledger"
        for name in [PROMPT] if is_cut else record:
            if record[name] != other[name] and not (is_retry and name == REASON):
                return f"request {index + 1}: {name}: {_first_difference(record[name], other[name])}"
    if len(play.sent) != len(reference.sent) or bool(play.refused) != bool(reference.refused):
        return f"{play}, with chat {reference}"
    return None


def _first_difference(value: Any, other: Any) -> str:
    if isinstance(value, list):
        value, other = dict(enumerate(value)), dict(enumerate(other))
    if not isinstance(value, Mapping):
        return f"{value}, with chat {other}"
    place = next(key for key in {**value, **other} if value.get(key) != other.get(key))
    return f"at {place}: {value.get(place, 'nothing')}, with chat {other.get(place, 'nothing')}"


# ------------------------------------------------------------------------------------------------- all of them


async def compare_protocols(url: str, admin_key: str, *, seed: int, max_tokens: int) -> int:
    """Play all episodes and print a line for each protocol. Return 0 if all are equal, else 1."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300.0)
    fields: dict[str, set[str]] = {dialect.path: set() for dialect in DIALECTS}
    num_calls, found = 0, list[str | None]()
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http:
        player = Player(http, url, admin_key, seed=seed, max_tokens=max_tokens)
        for episode in DATA["episodes"]:
            reference = await player.play(episode, DIALECTS[0])
            if not reference.sent:
                raise GatewayError(f"chat cannot begin the episode {episode['name']!r}: {reference.refused}")
            num_calls += reference.num_calls
            print(f"{episode['name']}\n  {DIALECTS[0].name:<22}{reference}")
            fields[DIALECTS[0].path] |= reference.fields
            for dialect in DIALECTS[1:]:
                play, text = await _compared(player, episode, dialect, reference)
                fields[dialect.path] |= play.fields if play else set()
                found.append(text)
                print(f"  {dialect.name:<22}{'equal' if text is None else f'DIFFERENT: {text}'}", flush=True)
    for path, own in fields.items():
        only = own.difference(*(others for other, others in fields.items() if other != path))
        print(f"not compared, only {path} has them: {', '.join(sorted(only))}")
    if num_calls == 0:
        print("note: the model called no tool, so nothing was shown about calls")
    num_different = len(found) - found.count(None)
    print(f"{num_different or 'all'} of {len(found)} plays {'differ from' if num_different else 'are equal to'} chat")
    return 1 if num_different else 0


async def _compared(
    player: Player, episode: JsonObject, dialect: Dialect, reference: Play
) -> tuple[Play | None, str | None]:
    """Play an episode through another protocol; return that, and its first difference from chat."""
    try:
        play = await player.play(episode, dialect)
    except GatewayError as error:
        return None, str(error)
    found = difference(play, reference)
    if found and difference(await player.play(episode, DIALECTS[0]), reference):
        found += f"; chat differs from itself, too: {NOT_REPEATABLE}"
    return play, found
