"""One game: each player reads what is new for it, and answers with a move.

The game's own rules judge: an illegal move is told to the player, and mostly loses when it is repeated.
"""

import asyncio
import random
import re
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.textarena.tasks import RANDOM

MOVE = re.compile(r"'(\[[^\]']+\])'")


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the score of the policy's seat, None without one. In self-play each player's last answer has its own."""
    game = await asyncio.to_thread(opened, task)
    chance = random.Random(rollout.seed)
    heard: list[list[ChatCompletionMessageParam]] = [[] for _ in range(task["num_players"])]
    last_ids: dict[int, str] = {}
    for _ in range(task["max_turns"]):
        player, news = game.get_observation()
        heard[player].append({"role": "user", "content": text_of(news, player)})
        if task["opponent"] is None or player == task["seat"]:
            client, model = rollout.client, rollout.model
        elif task["opponent"] == RANDOM:
            client, model = None, ""
        else:
            client = rollout.client(task["opponent"])
            model = client.model
        if client is None:
            move = random_move(heard[player], chance)
        else:
            reply = await client.chat.completions.create(model=model, messages=heard[player])
            last_ids[player] = reply.id
            move = reply.choices[0].message.content or ""
        heard[player].append({"role": "assistant", "content": move})
        is_over, _ = await asyncio.to_thread(game.step, move)
        if is_over:
            scores, _ = game.close()
            break
    else:
        return None
    rollout.log(**{f"score_{player}": score for player, score in scores.items()})
    if task["opponent"] is not None:
        return scores[task["seat"]]
    for player, completion in last_ids.items():
        rollout.reward(scores[player], completion=completion)
    return None


def opened(task: dict[str, Any]) -> Any:
    from textarena import make  # pyright: ignore  # the extra

    game = make(f"{task['game']}-raw")
    game.reset(num_players=task["num_players"], seed=task["seed"])
    return game


def text_of(news: list[tuple[int, str, Any]], player: int) -> str:
    """Return what a player has not read yet: its own moves are in its conversation.

    >>> text_of([(-1, "Go.", None), (0, "[a]", None), (1, "[b]", None)], 1)
    'Go.\\nPlayer 0: [a]'
    """
    return "\n".join(text if sender < 0 else f"Player {sender}: {text}" for sender, text, _ in news if sender != player)


def random_move(messages: list[ChatCompletionMessageParam], chance: random.Random) -> str:
    """Return one of the moves in quotation marks that the game listed last.

    >>> random_move([{"role": "user", "content": "Moves: '[a]'"}, {"role": "user", "content": "Go."}], random.Random(0))
    '[a]'
    """
    for message in reversed(messages):
        listed = str(message.get("content")).rpartition("\n")[2]
        if message["role"] == "user" and (moves := MOVE.findall(listed)):
            return chance.choice(moves)
    return "[0]"
