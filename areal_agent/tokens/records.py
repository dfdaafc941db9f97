"""Turns a closed trajectory into `TokenRecord`s, one a branch, with each sampled token in the loss of one of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_agent.errors import LedgerError
from areal_agent.tokens.loss_rule import LossRule, Mask
from areal_agent.types import Completion, FinishReason, ImageSpan, TokenRecord, Trajectory, Turn


def token_records(trajectory: Trajectory, rule: LossRule | None = None) -> tuple[TokenRecord, ...]:
    """Return one record for each leaf of the forest: the path from its root, trained where no earlier record trains it.

    Branch 0 ends with the newest answer, so what branches share is credited along the path to where the rollout
    ended. In the loss are the sampled tokens that the rule lets in; without one, those whose recorded probability is
    the one they were sampled with, in answers that the agent saw. A conversation that it leaves out has no record: no
    other shares a token with it. `turn_rewards` has the reward of a completion in the first record that ends or passes
    through it, and the final reward on the last turn of every record. Images are never in the loss. Raises LedgerError
    where a fork cuts through one.
    """
    masks = (rule or LossRule()).masks(trajectory)
    claims = _Claims(trajectory, masks)
    return tuple(claims.record(branch, path) for branch, path in enumerate(_branches(trajectory, masks)))


def sampled_spans(trajectory: Trajectory, rule: LossRule) -> tuple[Mapping[str, tuple[int, int]], ...]:
    """Return where sampled tokens stand in the records of `token_records`: for each, start and end by completion."""
    branches: list[Mapping[str, tuple[int, int]]] = []
    for path in _branches(trajectory, rule.masks(trajectory)):
        ends = np.cumsum([step.length for step in path]).tolist()
        branches.append(
            {step.completion.id: (end - step.num_sampled, end) for step, end in zip(path, ends, strict=True)}
        )
    return tuple(branches)


def _branches(trajectory: Trajectory, masks: Mapping[str, Mask]) -> "list[_Path]":
    return [path for path in reversed(_leaf_paths(trajectory.turns)) if not _is_left_out(path, masks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A turn on a path, and the numbers of its new prompt tokens and of its completion's tokens that the path keeps."""

    turn: Turn
    completion: Completion
    num_prompt: int
    num_sampled: int

    @property
    def length(self) -> int:
        return self.num_prompt + self.num_sampled

    def kept(self, num_tokens: int) -> "_Step":
        """Return this step, cut after its first `num_tokens` tokens."""
        num_prompt = min(self.num_prompt, num_tokens)
        return _Step(
            turn=self.turn,
            completion=self.completion,
            num_prompt=num_prompt,
            num_sampled=min(self.num_sampled, num_tokens - num_prompt),
        )


_Path = tuple[_Step, ...]


def _leaf_paths(turns: Sequence[Turn]) -> list[_Path]:
    """Return the paths that no later path contains, in the order of their last turn."""
    paths: dict[str, _Path] = {}
    covered: set[str] = set()
    for turn in turns:
        trunk = _trunk(turn, paths)
        if turn.parent is not None and turn.fork_at == _length(paths[turn.parent]):
            covered.add(turn.parent)
        for completion in turn.completions:
            step = _Step(
                turn=turn,
                completion=completion,
                num_prompt=len(turn.new_prompt_ids),
                num_sampled=len(completion.token_ids),
            )
            paths[completion.id] = (*trunk, step)
    return [path for completion_id, path in paths.items() if completion_id not in covered]


def _is_left_out(path: _Path, masks: Mapping[str, Mask]) -> bool:
    return masks.get(path[-1].completion.id) is Mask.OTHER_ROOTS


def _length(path: _Path) -> int:
    return sum(step.length for step in path)


def _trunk(turn: Turn, paths: dict[str, _Path]) -> _Path:
    """Return what `turn` keeps of its parent's path."""
    if turn.parent is None:
        return ()
    if turn.parent not in paths:
        raise LedgerError(f"turn {turn.id} continues completion {turn.parent}, which no earlier turn has")
    kept: list[_Step] = []
    room = turn.fork_at
    for step in paths[turn.parent]:
        if room <= 0:
            break
        kept.append(step.kept(room))
        room -= step.length
    if room > 0:
        raise LedgerError(f"turn {turn.id} forks {room} tokens past the end of completion {turn.parent}")
    return tuple(kept)


class _Claims:
    """Assigns each sampled token to the first branch that contains it; only that record trains it."""

    def __init__(self, trajectory: Trajectory, masked: Collection[str]) -> None:
        self._trajectory = trajectory
        self._masked = masked
        self._owners: dict[str, NDArray[np.int32]] = {}  # by completion: the branch that trains each token, or -1
        self._callers: dict[tuple[object, ...], int] = {}  # by request: the branch with its first answer
        self._unpaid = dict(trajectory.rewards.by_completion)

    def record(self, branch: int, path: _Path) -> TokenRecord:
        parent_branch: int | None = None
        fork_turn: int | None = None
        own_turn: int | None = None
        sample_of: int | None = None
        columns: list[_Columns] = []
        turn_rewards = np.zeros(len(path), dtype=np.float32)
        truncated = np.zeros(len(path), dtype=np.bool_)
        for index, step in enumerate(path):
            owners = self._owners_of(step.completion)[: step.num_sampled]
            is_new = owners < 0
            if not is_new.all():
                parent_branch, fork_turn = int(owners[~is_new][-1]), index
            if is_new.any():
                call = (step.turn.parent, step.turn.fork_at, step.turn.new_prompt_ids, step.turn.images)
                first = self._callers.setdefault(call, branch)
                if own_turn is None:
                    own_turn = index
                    sample_of = first if first != branch and is_new.all() else None
            if step.num_sampled == len(step.completion.token_ids):
                turn_rewards[index] += self._unpaid.pop(step.completion.id, 0.0)
                truncated[index] = step.completion.finish_reason is FinishReason.LENGTH
            owners[is_new] = branch
            is_trained = step.completion.id not in self._masked
            columns.append(_columns(index, step, is_new & is_trained))
        final_reward = np.float32(self._trajectory.rewards.final or 0.0)
        turn_rewards[-1] += final_reward
        return TokenRecord(
            session_id=self._trajectory.session_id,
            group_id=self._trajectory.group_id,
            branch=branch,
            parent_branch=parent_branch,
            token_ids=np.concatenate([column.token_ids for column in columns]),
            loss_mask=np.concatenate([column.loss_mask for column in columns]),
            turn_index=np.concatenate([column.turn_index for column in columns]),
            behavior_logprobs=np.concatenate([column.behavior_logprobs for column in columns]),
            temperatures=np.concatenate([column.temperatures for column in columns]),
            versions=np.concatenate([column.versions for column in columns]),
            incarnations=np.concatenate([column.incarnations for column in columns]),
            turn_rewards=turn_rewards,
            truncated=truncated,
            images=_images(path),
            final_reward=float(final_reward),
            fork_turn=fork_turn,
            own_turn=len(path) - 1 if own_turn is None else own_turn,
            sample_of=sample_of,
        )

    def _owners_of(self, completion: Completion) -> NDArray[np.int32]:
        if completion.id not in self._owners:
            self._owners[completion.id] = np.full(len(completion.token_ids), -1, dtype=np.int32)
        return self._owners[completion.id]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The part of a record's arrays that one step fills."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    turn_index: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    versions: NDArray[np.int32]
    incarnations: NDArray[np.int32]


def _columns(index: int, step: _Step, is_trained: NDArray[np.bool_]) -> _Columns:
    completion, first, end = step.completion, step.num_prompt, step.length
    loss_mask = np.zeros(end, dtype=np.bool_)
    loss_mask[first:] = is_trained
    return _Columns(
        token_ids=np.array(
            (*step.turn.new_prompt_ids[:first], *completion.token_ids[: step.num_sampled]), dtype=np.int32
        ),
        loss_mask=loss_mask,
        turn_index=np.full(end, index, dtype=np.int32),
        behavior_logprobs=_where(loss_mask, first, completion.logprobs, 0.0).astype(np.float32),
        temperatures=np.where(loss_mask, step.turn.sampling.temperature, 1.0).astype(np.float32),
        versions=_where(loss_mask, first, completion.version_steps(), -1).astype(np.int32),
        incarnations=_where(loss_mask, first, completion.version_incarnations(), -1).astype(np.int32),
    )


def _images(path: _Path) -> tuple[ImageSpan, ...]:
    """Return the images in the tokens of a path. Raises LedgerError where a fork cuts through one."""
    found: list[ImageSpan] = []
    start = 0
    for step in path:
        for one in step.turn.images:
            if one.start < step.num_prompt < one.end:
                raise LedgerError(f"image {one.digest} of turn {step.turn.id} is cut by a later turn")
            if one.end <= step.num_prompt:
                found.append(one.after(start))
        start += step.length
    return tuple(found)


def _where(loss_mask: NDArray[np.bool_], first: int, sampled: Sequence[float], otherwise: float) -> NDArray[np.float64]:
    """Return `sampled`, placed from position `first` on, where the mask is set, and `otherwise` elsewhere."""
    laid = np.full(len(loss_mask), otherwise, dtype=np.float64)
    laid[first:] = sampled[: len(loss_mask) - first]
    return np.where(loss_mask, laid, otherwise)
