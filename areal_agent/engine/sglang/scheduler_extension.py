"""Lets SGLang's schedulers receive weights from the trainer while they sample. The schedulers import this file.

Their environment has no areal_agent. SGLang has no way to add methods, so three of its own are wrapped by means of its
hook registry:

    check_weights             handles our actions: receive weights, report progress. `skip_tensor_list` carries the
                              arguments; the answer's message carries our result
    _get_weights_iterator     for a folder name that stands for a push: yields the tensors received in it
    update_weights_from_disk  drops the received weights once a real folder serves, and what was seen in images

The rest of a load is SGLang's: a load from a folder, except for where the numbers come from.
A call reaches all schedulers of a model at once, one for each GPU; the first one answers for all.
"""

import importlib
import runpy
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

ACTION = "areal_agent."  # as server.py has it
RECEIVED = "areal-agent-push:"  # as server.py has it

RECEPTION = Path(__file__).parents[1] / "foreign" / "reception.py"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"

reception = SimpleNamespace(
    **runpy.run_path(str(RECEPTION))
)  # loaded by path, because areal_agent is not installed there


OfAll = Callable[[Any, str], list[str]]
"""A function of a scheduler's updater and a value: gathers the values of the model's schedulers by rank."""


class WeightReceiving:
    """The receptions of one scheduler. `of_all` reaches the model's other schedulers; `answer` builds an answer."""

    def __init__(self, answer: Callable[..., Any], of_all: OfAll) -> None:
        self._answer = answer
        self._of_all = of_all
        self.receptions: Mapping[str, Any] = {}  # by push

    def around_check(self, original: Callable[..., Any], updater: Any, asked: Any) -> Any:
        """Carry out the action if it is one of ours."""
        if not asked.action.startswith(ACTION):
            return original(updater, asked)
        try:
            method = {"receive_weights": self._receive, "received": self._received}[asked.action.removeprefix(ACTION)]
            return self._answer(success=True, message=method(updater, *asked.skip_tensor_list))
        except Exception as error:  # the boundary: an exception here would end the server
            return self._answer(success=False, message=f"{asked.action} failed: {error!r}")

    def around_iterator(
        self, original: Callable[..., Any], loader: Any, source: Any, **options: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to load."""
        if not source.model_or_path.startswith(RECEIVED):
            return original(loader, source, **options)
        return reception.tensors_of(self.receptions, source.model_or_path.removeprefix(RECEIVED))

    def around_update(self, original: Callable[..., Any], updater: Any, asked: Any) -> Any:
        """Drop the received weights once a folder has been loaded."""
        answer = original(updater, asked)
        if answer.success and not asked.model_path.startswith(RECEIVED):
            self.receptions = {}
        return answer

    def _receive(self, updater: Any, push_id: str, told: str, beside: str) -> str:
        """Start to receive a set of weights. Of the earlier ones, only `beside` is kept."""
        names = self._of_all(updater, secrets.token_hex(8))
        runner = updater.tp_worker.model_runner.weight_updater
        begun = reception.Reception(
            told,
            group=names[0],  # replicas do not know each other, so each is a group of its own
            num_members=len(names),
            device=torch.device(f"cuda:{runner.gpu_id}" if runner.device == "cuda" else runner.device),
        )
        kept = {name: one for name, one in self.receptions.items() if name == beside}
        self.receptions = {**kept, push_id: begun}
        return begun.state

    def _received(self, updater: Any, push_id: str) -> str:
        """Return the state of all schedulers: `receiving`, `proved`, or the `failed` of one of them with its reason."""
        states = self._of_all(updater, reception.state_of(self.receptions, push_id))
        failed = [state for state in states if state.startswith("failed")]
        return [*failed, *(state for state in states if state != reception.PROVED), reception.PROVED][0]


def register() -> None:
    """Register the hooks with SGLang, which installs them before it loads anything."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    receiving = WeightReceiving(_answer, _of_all)
    for target, hook in (
        (f"{UPDATER}.check_weights", receiving.around_check),
        (f"{UPDATER}.update_weights_from_disk", receiving.around_update),
        (f"{UPDATER}.update_weights_from_disk", forget_images),
        (f"{LOADER}._get_weights_iterator", receiving.around_iterator),
    ):
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)


def forget_images(original: Callable[..., Any], updater: Any, asked: Any) -> Any:
    """Load weights, and forget what the old ones saw in images, which SGLang would remember for the new ones."""
    try:
        return original(updater, asked)
    finally:
        seen = importlib.import_module("sglang.srt.managers.mm_schedule").embedding_cache
        if seen is not None:
            seen.clear()


def _answer(**fields: Any) -> Any:
    return importlib.import_module("sglang.srt.managers.io_struct").CheckWeightsReqOutput(**fields)


def _of_all(updater: Any, mine: str) -> list[str]:
    schedulers = updater.tp_cpu_group
    told: list[Any] = [None] * torch.distributed.get_world_size(schedulers)
    if len(told) != torch.distributed.get_world_size():
        raise ValueError("SGLang does not reach the later stages of a pipeline; leave out --pp-size")
    torch.distributed.all_gather_object(told, mine, group=schedulers)
    return told
