"""`results.eval`: an evaluation as a log of inspect_ai, which `inspect view` and `read_eval_log` read.

The package is not needed. A log is a zip of JSON, written a sample at a time::

    header.json                     what was evaluated, and the figures
    samples/TASK_epoch_NUMBER.json  one rollout: its conversation from the ledger, scores, tokens, error
    summaries.json                  the samples without their conversations

Epochs are the samples of a task, from 1. (inspect_ai 0.3.285: `log/_log.py` has the schema, `log/_recorders/eval.py`
the form of the file.)
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from areal_agent import __version__
from areal_agent.config import Config
from areal_agent.files import RunFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.run.scores import Sample, Scores
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript
from areal_agent.types import JsonObject, Status, Task, Trajectory

LOG = "results.eval"
SCHEMA_VERSION = 2
MAX_SHOWN = 1000  # characters of a question in a summary
ROLES = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's messages that inspect_ai has under another name."""

Messages = list[dict[str, Any]]


def write_inspect_log(
    folder: RunFolder, config: Config, tasks: Sequence[Task], samples: Sequence[Sample], scores: Scores
) -> Path:
    """Write the log of an evaluation into its folder. `samples` are those of the first task, then of the next ..."""
    path, each = folder.path / LOG, len(samples) // len(tasks)
    model = config.eval.api.model if config.eval.api else config.model
    summaries: Messages = []
    with reading(folder.ledger) as snapshot, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        transcript = Transcript.of_ledger(questions.note(snapshot, TRANSCRIPT_NOTE), folder.path, None)
        for place, sample in enumerate(samples):
            trajectory = questions.trajectory(snapshot, sample.session_id)
            entry = _entry(
                tasks[place // each], place % each + 1, sample, trajectory, model, config.eval.success_reward
            )
            asked, answer = _conversation(trajectory, transcript)
            given = asked[: next((at for at, one in enumerate(asked) if one["role"] == "assistant"), None)]
            stop_reason = "max_tokens" if sample.is_truncated else "stop"
            choices = [{"message": one, "stop_reason": stop_reason} for one in answer]
            whole = {"input": given, "messages": asked + answer, "output": {"model": model, "choices": choices}}
            archive.writestr(f"samples/{entry['id']}_epoch_{entry['epoch']}.json", orjson.dumps(entry | whole))
            question = str(given[-1]["content"])[:MAX_SHOWN] if given else ""
            error = entry["error"] and entry["error"]["message"]
            counts = {"message_count": len(whole["messages"]), "completed": True}
            summaries.append({**entry, "input": question, "error": error, **counts})
        header = _header(folder, config, model, tasks, each, scores) | {
            "stats": {
                "started_at": min(one["started_at"] for one in summaries),
                "completed_at": max(one["completed_at"] for one in summaries),
            }
        }
        archive.writestr("summaries.json", orjson.dumps(summaries))
        archive.writestr("header.json", orjson.dumps(header))
    return path


def _header(
    folder: RunFolder, config: Config, model: str, tasks: Sequence[Task], each: int, scores: Scores
) -> dict[str, Any]:
    name, source, rollout = folder.path.resolve().name, config.eval.tasks or config.tasks, config.rollout
    right = scores.pass_at_1
    success = {"accuracy": right.mean, "low": right.low, "high": right.high}
    success |= {f"pass_at_{k}": share for k, share in sorted(scores.pass_at.items())}
    success |= {} if scores.majority is None else {"majority": scores.majority}
    dataset = {"name": source and source.source, "samples": len(tasks), "sample_ids": [one.id for one in tasks]}
    return {
        "version": SCHEMA_VERSION,
        "status": "success",
        "eval": {
            "created": _time(folder.config.stat().st_mtime),
            "run_id": name,
            "task": name,
            "dataset": dataset,
            "model": model,
            "model_base_url": config.eval.api and config.eval.api.url,
            "model_generate_config": {"temperature": rollout.temperature, "max_tokens": rollout.max_tokens},
            "solver": config.workflow,
            "config": {"epochs": each, "epochs_reducer": ["mean"]},
            "packages": {"areal-agent": __version__},
        },
        "results": {
            "total_samples": len(tasks) * each,
            "completed_samples": scores.num_samples,
            "scores": [_score("success", success), _score("reward", {"mean": scores.reward_mean})],
        },
    }


def _score(name: str, figures: Mapping[str, float]) -> JsonObject:
    return {"name": name, "scorer": name, "metrics": {one: {"name": one, "value": n} for one, n in figures.items()}}


def _entry(
    task: Task, epoch: int, sample: Sample, trajectory: Trajectory, model: str, success_reward: float
) -> dict[str, Any]:
    """Return a sample without its conversation."""
    scores: dict[str, JsonObject] = {}
    if sample.reward is not None:
        scores["success"] = {"value": "C" if sample.reward >= success_reward else "I", "answer": sample.answer}
        scores |= {f"part/{name}": {"value": part} for name, part in trajectory.rewards.parts.items()}
        scores["reward"] = {"value": sample.reward}
    error = f"{trajectory.status}: {trajectory.error or 'no reason is recorded'}"
    asked, sampled = sum(turn.fork_at + len(turn.new_prompt_ids) for turn in trajectory.turns), sample.num_tokens
    return {
        "id": task.id,
        "epoch": epoch,
        "target": str(task.data.get("answer", "")),
        "scores": scores,
        "metadata": {"session": sample.session_id, "status": sample.status},
        "model_usage": {model: {"input_tokens": asked, "output_tokens": sampled, "total_tokens": asked + sampled}},
        "started_at": _time(trajectory.started_s),
        "completed_at": _time(trajectory.ended_s),
        "total_time": sample.seconds,
        "error": None
        if trajectory.status is Status.COMPLETED
        else {"message": error, "traceback": "", "traceback_ansi": ""},
    }


def _conversation(trajectory: Trajectory, transcript: Transcript) -> tuple[Messages, Messages]:
    """Return the messages of the longest request, or of the last to an API, and its answer, if there is any."""
    if trajectory.turns:
        asked_in = transcript.conversations(trajectory.turns)
        longest = max(reversed(trajectory.turns), key=lambda turn: len(asked_in(turn)))
        asked, answers = asked_in(longest), [transcript.message(longest, one) for one in longest.completions[:1]]
        return [_message(one) for one in asked], [_message(one) for one in answers]
    calls = [one for name, one in trajectory.logged.items() if name.startswith("api.")]
    match calls[-1] if calls else None:
        case None:
            return [], []
        case {"asked": {"messages": [*asked]}, "answer": {"choices": [{"message": answer}, *_]}}:
            return [_message(one) for one in asked], [_message(answer)]
        case other:  # of another API, or a stream
            said = {"user": other.get("asked"), "assistant": other.get("answer")}
            told = [{"role": role, "content": _text(text)} for role, text in said.items() if text is not None]
            return told[:1], told[1:]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _message(given: JsonObject) -> dict[str, Any]:
    """Return a message of OpenAI's as inspect_ai has it. Parts of a content that are no text become their JSON."""
    content: Any = given.get("content") or ""
    parts = [content] if isinstance(content, str) else [one.get("text", one) for one in content]
    text, thought = "\n".join(map(_text, parts)), given.get("reasoning_content")
    thinking = [{"type": "reasoning", "reasoning": thought}] if thought else []
    made: dict[str, Any] = {
        "role": ROLES.get(given["role"], given["role"]),
        "content": [*thinking, {"type": "text", "text": text}] if thinking else text,
    }
    if calls := given.get("tool_calls"):
        made["tool_calls"] = [_call(one.get("id"), one.get("function") or one.get("custom") or {}) for one in calls]
    return made | {key: given[key] for key in ("tool_call_id",) if key in given}


def _call(call_id: str | None, function: JsonObject) -> JsonObject:
    """Return a call as inspect_ai has it. Earlier messages come from agents, so their arguments may be anything.

    >>> given = {}, {"arguments": {"a": 1}}, {"arguments": '{"a": 1%s}' % ("0" * 30)}, {"input": "[1]"}
    >>> [_call("c", {"name": "f", **one})["arguments"] for one in given]
    [{}, {'a': 1}, {'a': 1e+30}, {'arguments': [1]}]
    """
    call: dict[str, Any] = {
        "id": call_id or "",
        "function": str(function.get("name")),
        "type": "function",
        "arguments": {},
    }
    text = _text(function.get("arguments") or function.get("input") or "")
    try:
        found = orjson.loads(text)
    except ValueError as error:
        return call | {"parse_error": f"{error}: {text}"}
    return call | {"arguments": found if isinstance(found, dict) else {"arguments": found}}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
