"""One game: each player reads what is new for it, and answers with a move.

The game's own rules judge: an illegal move is told to the player, and mostly loses when it is repeated.
"""

import asyncio
import random
import re
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Role, Rollout
from envs.textarena.tasks import RANDOM

MOVE = re.compile(r"'(\[[^\]']+\])'")


async def solve(task: dict[str, Any], rollout: Rollout) -> None:
    """Reward the policy's seat with its score, in self-play each seat. A game without an end has no reward."""
    game = await asyncio.to_thread(opened, task)
    chance = random.Random(rollout.seed)
    heard: list[list[ChatCompletionMessageParam]] = [[] for _ in range(task["num_players"])]
    plays_all = task["opponent"] is None
    seats: dict[int, Role] = {task["seat"]: rollout}  # those that the policy plays
    for _ in range(task["max_turns"]):
        player, news = game.get_observation()
        heard[player].append({"role": "user", "content": text_of(news, player)})
        if plays_all and player not in seats:
            seats[player] = await rollout.role(f"player_{player}")
        if player in seats:
            client, model = seats[player].client, rollout.model
        elif task["opponent"] == RANDOM:
            client, model = None, ""
        else:
            client = rollout.client(task["opponent"])
            model = client.model
        if client is None:
            move = random_move(heard[player], chance)
        else:
            reply = await client.chat.completions.create(model=model, messages=heard[player])
            move = reply.choices[0].message.content or ""
        heard[player].append({"role": "assistant", "content": move})
        is_over, _ = await asyncio.to_thread(game.step, move)
        if is_over:
            scores, _ = game.close()
            break
    else:
        return
    rollout.log(**{f"score_{player}": score for player, score in scores.items()})
    for player, role in seats.items():
        role.reward(scores[player])


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
