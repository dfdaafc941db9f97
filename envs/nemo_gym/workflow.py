"""The model answers a row of NeMo Gym and calls the tools of its resources server, which judges the whole.

The order of calls is that of NeMo Gym's own `simple_agent`: /seed_session, /TOOL for each call, /verify. A cookie names
the session, so each rollout has an HTTP client of its own. What a tool says is for the model to read, errors too. A
server that is gone, or cannot open or judge a session, raises SandboxError: that is not the model's failure.
"""

import asyncio
import json
from typing import Any

import aiohttp
import openai

from areal_agent import Rollout, SandboxError
from sandboxes.tools import shortened

PROXY_STATUS = (502, 503, 504)
"""What a proxy answers for a server that is away."""


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the reward of /verify, None without one; its components are named parts."""
    url, row = task["url"], task["row"]
    cookies = aiohttp.CookieJar(unsafe=True, quote_cookie=False)  # `unsafe`: also those of an IP address
    async with aiohttp.ClientSession(cookie_jar=cookies, timeout=aiohttp.ClientTimeout()) as http:
        await ask(http, f"{url}/seed_session", row)
        response = await converse(task, rollout, http)
        judged = await ask(http, f"{url}/verify", row | {"response": response})
    if judged.get("mask_sample") or judged.get("_ng_failure_class"):  # its environment failed, or its judge
        why = judged.get("failure_reason") or judged.get("failure_kind") or "mask_sample"
        raise SandboxError(f"NeMo Gym could not judge the rollout: {why}")
    for name, value in (judged.get("reward_components") or {}).items():
        if value is not None:
            rollout.reward(value, name=name)
    return judged.get("reward")


async def converse(task: dict[str, Any], rollout: Rollout, http: aiohttp.ClientSession) -> dict[str, Any]:
    """Return the last response, whose output is that of all turns with the results of the calls.

    A conversation ends with an answer that calls nothing or is cut, a full context, or after `max_turns` answers.
    """
    params: dict[str, Any] = task["row"]["responses_create_params"]
    tools = {tool.get("name") for tool in params.get("tools") or ()}
    asked = [{"role": "user", "content": params["input"]}] if isinstance(params["input"], str) else params["input"]
    output: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    for _ in range(task["max_turns"]):
        options: dict[str, Any] = params | {"model": rollout.model, "input": [*asked, *output]}
        try:
            reply = await rollout.client.responses.create(**options)
        except openai.BadRequestError as error:
            if last and error.code == "context_length_exceeded":
                break
            raise
        last = reply.to_dict()
        output += [item.to_dict() for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if reply.incomplete_details or not calls:
            break
        for call in calls:
            text = f"Error: there is no tool {call.name!r}"
            if call.name in tools:  # no other: /verify is on the same server
                text = await result_of(http, f"{task['url']}/{call.name}", call.arguments, task["call_s"])
            output.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
    return last | {"output": output}


async def result_of(http: aiohttp.ClientSession, url: str, arguments: str, call_s: float) -> str:
    """Call a tool with the JSON that the model wrote, and return the text for it. Raises SandboxError."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return f"Error: the arguments are no JSON: {error}"
    try:
        async with asyncio.timeout(call_s):
            status, text = await post(http, url, values)
    except TimeoutError:
        return f"Error: it did not answer within {call_s:g} s"
    if status in PROXY_STATUS:
        raise SandboxError(f"the resources server answered {url} with {status}: {text:.500}")
    return shortened(text)


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what /seed_session or /verify answers. Raises SandboxError."""
    status, text = await post(http, url, body)
    try:
        answer = json.loads(text) if status == 200 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise SandboxError(f"the resources server answered {url} with {status}: {text:.500}")
    return answer


async def post(http: aiohttp.ClientSession, url: str, body: object) -> tuple[int, str]:
    try:
        async with http.post(url, json=body) as response:
            return response.status, await response.text(errors="replace")
    except (aiohttp.ClientError, OSError) as error:
        raise SandboxError(f"the resources server is gone at {url}: {type(error).__name__}: {error}") from error
