"""Agents made of the official clients: `python official_agents.py NAME BASE_URL KEY`, where that client is installed.

Each asks two questions, lets the model call tools, sends the results back, whole and streamed, and prints the last
answer. The clients keep the history, in their own form.
"""

import asyncio
import itertools
import json
import sys
from typing import Any

IS_STREAMED = itertools.cycle((False, True))
QUESTIONS = ("Weather in Rome?", "And in Oslo and Bern?")
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """Weather of a city."""
    return f"{len(city) * 3} °C in {city}"


def openai_chat(base_url: str, key: str) -> str:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=key)
    function = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS, "strict": True}
    messages: list[Any] = [{"role": "system", "content": "Use tools."}]
    options: Any = {"model": "default", "messages": messages, "tools": [{"type": "function", "function": function}]}
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            if not next(IS_STREAMED):
                message = client.chat.completions.create(**options).choices[0].message
            else:
                with client.chat.completions.stream(**options) as stream:
                    message = stream.get_final_completion().choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                text = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                break
    return message.content or ""


def openai_responses(base_url: str, key: str, *, by_id: bool = False) -> str:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=key)
    items: list[Any] = []
    tool = {"type": "function", "name": "weather", "description": "Weather.", "parameters": PARAMETERS, "strict": True}
    options: Any = {"model": "default", "input": items, "instructions": "Use tools.", "tools": [tool]}
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            if not next(IS_STREAMED):
                response = client.responses.create(**options)
            else:
                with client.responses.stream(**options) as stream:
                    response = stream.get_final_response()
            if by_id:
                options["previous_response_id"] = response.id
                items.clear()
            else:
                items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                text = weather(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
            if not calls:
                break
    return response.output_text


def openai_responses_by_id(base_url: str, key: str) -> str:
    return openai_responses(base_url, key, by_id=True)


def anthropic_messages(base_url: str, key: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=key)
    messages: list[Any] = []
    system = [{"type": "text", "text": "Use tools.", "cache_control": {"type": "ephemeral"}}]
    tool = {"name": "weather", "description": "Weather of a city.", "input_schema": PARAMETERS}
    options: Any = {"model": "default", "max_tokens": 200, "messages": messages, "tools": [tool]}
    options["system"] = system
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            if not next(IS_STREAMED):
                message = client.messages.create(**options)
            else:
                with client.messages.stream(**options) as stream:
                    message = stream.get_final_message()
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            if message.stop_reason != "tool_use":
                break
            messages.append({"role": "user", "content": results})
    assert client.messages.count_tokens(model="default", messages=messages).input_tokens > 0
    return "".join(block.text for block in message.content if block.type == "text")


def openai_agents(base_url: str, key: str) -> str:
    import agents
    import openai

    async def play() -> str:
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(openai.AsyncOpenAI(base_url=base_url, api_key=key), use_for_tracing=False)
        agent = agents.Agent(
            name="a", instructions="Use tools.", tools=[agents.function_tool(weather)], model="default"
        )
        first = await agents.Runner.run(agent, QUESTIONS[0])
        second = agents.Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": QUESTIONS[1]}])
        async for _ in second.stream_events():
            pass
        return str(second.final_output)

    return asyncio.run(play())


AGENTS = {one.__name__: one for one in (openai_chat, openai_responses, openai_responses_by_id)}
AGENTS |= {one.__name__: one for one in (anthropic_messages, openai_agents)}

if __name__ == "__main__":
    name, base_url, key = sys.argv[1:]
    print(AGENTS[name](base_url, key))
