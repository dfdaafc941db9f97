"""Two gateways to compare with: the floor, which tokenises what is new, and one that tokenises all of it every turn.

    python benchmarks/gateway/references.py floor|retokenise --engine URL --tokenizer DIR

Both render the chat template, ask the engine for ids, and read the tool call out of the answer. The floor also keeps
each session's ids. Neither checks anything, has a ledger or knows of branches. Prints its port.
"""

import argparse
import asyncio
import json
import re
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from transformers import AutoTokenizer

CALL = re.compile(r"\n?<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Session:
    """What one agent has said so far, and the ids of all of it and the last answer."""

    messages: list[Any] = field(default_factory=list[Any])
    ids: list[int] = field(default_factory=list[int])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["floor", "retokenise"])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--tokenizer", required=True)
    args = parser.parse_args()
    gateway = Reference(args.engine, args.tokenizer, is_incremental=args.kind == "floor")
    asyncio.run(gateway.serve())


class Reference:
    """One of the two gateways."""

    def __init__(self, engine: str, tokenizer: str, *, is_incremental: bool) -> None:
        self._engine = engine
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._is_incremental = is_incremental
        self._sessions: dict[str, Session] = {}  # by the Authorization header
        self._numbers = count()

    async def chat(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        session = self._sessions[request.headers["Authorization"]]
        prompt = self._prompt(session, body["messages"], body["tools"])
        asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1024}, "return_logprob": True}
        async with self._http.post(f"{self._engine}/generate", data=orjson.dumps(asked), headers=JSON) as response:
            generated = orjson.loads(await response.read())
        ids = generated["output_ids"]
        if self._is_incremental:
            session.messages, session.ids = body["messages"], prompt + ids
        text = self._tokenizer.decode(ids[:-1])
        calls = [self._call(found) for found in CALL.findall(text)]
        message = {"role": "assistant", "content": CALL.sub("", text), "tool_calls": calls}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        reply = {"id": f"c{next(self._numbers)}", "object": "chat.completion", "choices": [choice], "usage": usage}
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    def _prompt(self, session: Session, messages: list[Any], tools: list[Any]) -> list[int]:
        known = len(session.messages)
        if known and messages[:known] == session.messages:
            added = self._render([{"role": "assistant", "content": ""}, *messages[known + 1 :]], None)
            return session.ids + self._encode(added.partition("<|im_end|>")[2])
        for call in (call for message in messages for call in message.get("tool_calls") or ()):
            call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])  # as templates want them
        return self._encode(self._render(messages, tools))

    def _render(self, messages: list[Any], tools: list[Any] | None) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def _call(self, text: str) -> dict[str, Any]:
        call = json.loads(text)
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        return {"id": f"call_{next(self._numbers)}", "type": "function", "function": function}

    async def session(self, request: web.Request) -> web.Response:
        key = f"k{next(self._numbers)}"
        self._sessions[f"Bearer {key}"] = Session()
        return web.json_response({"session_id": key, "api_key": key})

    async def serve(self) -> None:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/rl/start_session", self.session)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    main()
