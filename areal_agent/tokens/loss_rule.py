"""Which sampled tokens of a trajectory are in the loss, and why the others are not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from areal_agent.types import Completion, Distribution, Drop, FinishReason, JsonObject, Trajectory, Turn


class TrainRoots(StrEnum):
    """The conversations of a session that are trained."""

    ALL = "all"
    MAIN = "main"  # the one with the most turns


class Mask(StrEnum):
    """The reason for which an answer is not in the loss."""

    OTHER_ROOTS = "other_roots"  # it is of another conversation than the main one: a title, a sub-agent
    UNSEEN = "unseen"  # it was aborted, or never reached the agent
    ALTERED = "altered"  # its recorded probabilities are not those that it was sampled with


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRule:
    """Decides which answers are in the loss.

    `trains_altered`: `altered` tokens too, except greedy ones (their temperature is 0). `trains_greedy`: those as well,
    for a loss that reads no recorded probabilities. `roots`: of all conversations of a session, or of the main one.
    """

    trains_altered: bool = False
    trains_greedy: bool = False
    roots: TrainRoots = TrainRoots.ALL

    def masks(self, trajectory: Trajectory) -> Mapping[str, Mask]:
        """Return the completions that are not in the loss, by id, each with the reason."""
        others = _beside_the_main(trajectory.turns) if self.roots is TrainRoots.MAIN else frozenset[str]()
        unseen = frozenset(trajectory.undelivered)
        masks: dict[str, Mask] = {}
        for turn in trajectory.turns:
            for one in turn.completions:
                if turn.id in others:
                    masks[one.id] = Mask.OTHER_ROOTS
                elif one.finish_reason is FinishReason.ABORT or one.id in unseen:
                    masks[one.id] = Mask.UNSEEN
                elif not self._is_usable(turn, one):
                    masks[one.id] = Mask.ALTERED
        return masks

    def masked_tokens(self, trajectory: Trajectory) -> Counter[Mask]:
        """Return the number of sampled tokens that are not in the loss, by reason."""
        masks = self.masks(trajectory)
        counts: Counter[Mask] = Counter()
        for one in (one for turn in trajectory.turns for one in turn.completions if one.id in masks):
            counts[masks[one.id]] += len(one.token_ids)
        return counts

    def drop_of(self, trajectory: Trajectory) -> Drop:
        """Return the fate of a trajectory that teaches nothing: `altered` if that is why no token is in the loss."""
        masks = self.masks(trajectory)
        is_masked = all(one.id in masks for turn in trajectory.turns for one in turn.completions)
        return Drop.ALTERED if is_masked and Mask.ALTERED in masks.values() else Drop.FILTERED

    def _is_usable(self, turn: Turn, completion: Completion) -> bool:
        is_exact = completion.distribution is Distribution.EXACT
        return is_exact or (self.trains_altered and (self.trains_greedy or turn.sampling.temperature > 0))


def _beside_the_main(turns: Sequence[Turn]) -> frozenset[str]:
    """Return the ids of the turns outside the main conversation: the one with the most turns, of equals the first.

    Roots with an equal first message that is not the system's are one conversation; so are all plain completions.
    """
    conversation_of: dict[str, str] = {}  # by completion
    members: dict[str, list[str]] = {}  # turns by conversation, in the order of their first turn
    for turn in turns:
        conversation = _beginning(turn.request_delta) if turn.parent is None else conversation_of[turn.parent]
        members.setdefault(conversation, []).append(turn.id)
        conversation_of |= dict.fromkeys((one.id for one in turn.completions), conversation)
    main = max(members, key=lambda conversation: len(members[conversation]), default="")
    return frozenset(turn_id for conversation, ids in members.items() if conversation != main for turn_id in ids)


def _beginning(messages: Sequence[JsonObject]) -> str:
    """Return the role and content of the first message that is not the system's; of a plain completion, nothing."""
    first = next((one for one in messages if one["role"] not in ("system", "developer")), None)
    if first is None:
        return ""
    content = first.get("content")
    parts = cast(list[Mapping[str, Any]], content) if isinstance(content, list) else [{"text": content}]
    return f"{first['role']}: " + "".join(str(part.get("text", part)) for part in parts)  # an image has its digest
