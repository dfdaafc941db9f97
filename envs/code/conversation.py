"""The parts that workflows share: a turn of the model, its calls, and the code in its answers.

Ordinary agent code over a stock `openai` client.
"""

import re

from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam

from areal_agent import Rollout
from sandboxes.tools import Toolbox

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


async def take_turn(
    rollout: Rollout, messages: list[ChatCompletionMessageParam], toolbox: Toolbox
) -> ChatCompletionMessage:
    """Let the model speak, and run its calls; both are added to `messages`."""
    reply = await rollout.client.chat.completions.create(
        model=rollout.model,
        messages=messages,
        tools=toolbox.definitions,  # pyright: ignore[reportArgumentType]  # as OpenAI writes them
    )
    message = reply.choices[0].message
    messages.append(message.to_dict())  # pyright: ignore[reportArgumentType]  # what was received may be sent
    for call in message.tool_calls or ():
        name, arguments = (
            (call.function.name, call.function.arguments) if call.type == "function" else (call.custom.name, "")
        )
        content = await toolbox.call(name, arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message


async def asked_for_code(rollout: Rollout, question: str) -> str | None:
    """Ask once, and return the program in the answer, which is logged; None when there is none."""
    reply = await rollout.client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": question}]
    )
    code = fenced_code(reply.choices[0].message.content)
    rollout.log(answer=code or "")
    return code


def fenced_code(text: str | None) -> str | None:
    r"""Return the last fenced block of a message; None when there is none.

    >>> fenced_code("So:\n```python\nx = 1\n```\nDone.")
    'x = 1\n'
    """
    blocks: list[str] = FENCED.findall(text or "")
    return blocks[-1] if blocks else None
