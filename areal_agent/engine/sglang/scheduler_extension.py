"""What SGLang's schedulers can do besides: take weights from the trainer, while they sample. Imported by them.

They have an environment of their own, without areal_agent. SGLang has no methods of others, so they are put around
three of its own, by its registry of hooks:

    check_weights             of our actions: receive a set of weights, say how far that is. `skip_tensor_list` has the
                              arguments; the message of the answer is ours
    _get_weights_iterator     of a folder with our name for what came in a push: the tensors that came
    update_weights_from_disk  once a folder serves, nothing of what came is needed

Everything else about a load stays SGLang's: it is a load from a folder, but for where the numbers come from.
A call reaches all schedulers of a model at once, one a GPU; the first one answers, for all.
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

ACTION = "areal_agent."  # as receiver.py has it
RECEIVED = "areal-agent-push:"  # as info.py has it

RECEPTION = Path(__file__).parents[1] / "foreign" / "reception.py"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"

reception = SimpleNamespace(**runpy.run_path(str(RECEPTION)))  # areal_agent is not there


OfAll = Callable[[Any, str], list[str]]
"""Of a scheduler's updater and of what it has: what each scheduler of the model has, by rank."""


class WeightReceiving:
    """Of one scheduler, which the others of its model are known `of_all` to; `answer` makes one of SGLang's."""

    def __init__(self, answer: Callable[..., Any], of_all: OfAll) -> None:
        self._answer = answer
        self._of_all = of_all
        self.receptions: Mapping[str, Any] = {}  # by push

    def around_check(self, original: Callable[..., Any], updater: Any, asked: Any) -> Any:
        """Do what is asked, if it is one of ours."""
        if not asked.action.startswith(ACTION):
            return original(updater, asked)
        try:
            method = {"receive_weights": self._receive, "received": self._received}[asked.action.removeprefix(ACTION)]
            return self._answer(success=True, message=method(updater, *asked.skip_tensor_list))
        except Exception as error:  # the boundary: what is raised here ends the server
            return self._answer(success=False, message=f"{asked.action} failed: {error!r}")

    def around_iterator(
        self, original: Callable[..., Any], loader: Any, source: Any, **options: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of what is to be loaded."""
        if not source.model_or_path.startswith(RECEIVED):
            return original(loader, source, **options)
        return reception.tensors_of(self.receptions, source.model_or_path.removeprefix(RECEIVED))

    def around_update(self, original: Callable[..., Any], updater: Any, asked: Any) -> Any:
        """Nothing is needed beside a folder."""
        answer = original(updater, asked)
        if answer.success and not asked.model_path.startswith(RECEIVED):
            self.receptions = {}
        return answer

    def _receive(self, updater: Any, push_id: str, told: str, beside: str) -> str:
        """Begin to receive a set of weights. Of those before only `beside` is kept."""
        names = self._of_all(updater, secrets.token_hex(8))
        runner = updater.tp_worker.model_runner.weight_updater
        begun = reception.Reception(
            told,
            group=names[0],  # replicas know nothing of each other, and are groups of their own
            num_members=len(names),
            device=torch.device(f"cuda:{runner.gpu_id}" if runner.device == "cuda" else runner.device),
        )
        kept = {name: one for name, one in self.receptions.items() if name == beside}
        self.receptions = {**kept, push_id: begun}
        return begun.state

    def _received(self, updater: Any, push_id: str) -> str:
        """What is true of all: `receiving`, `proved`, or of one of them: `failed` and why."""
        states = self._of_all(updater, reception.state_of(self.receptions, push_id))
        failed = [state for state in states if state.startswith("failed")]
        return [*failed, *(state for state in states if state != reception.PROVED), reception.PROVED][0]


def register() -> None:
    """With SGLang, which puts the hooks in place before it loads anything."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    receiving = WeightReceiving(_answer, _of_all)
    for target, hook in (
        (f"{UPDATER}.check_weights", receiving.around_check),
        (f"{UPDATER}.update_weights_from_disk", receiving.around_update),
        (f"{LOADER}._get_weights_iterator", receiving.around_iterator),
    ):
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)


def _answer(**fields: Any) -> Any:
    return importlib.import_module("sglang.srt.managers.io_struct").CheckWeightsReqOutput(**fields)


def _of_all(updater: Any, mine: str) -> list[str]:
    schedulers = updater.tp_cpu_group
    told: list[Any] = [None] * torch.distributed.get_world_size(schedulers)
    if len(told) != torch.distributed.get_world_size():
        raise ValueError("SGLang tells nothing of the later stages of a pipeline; leave --pp-size out")
    torch.distributed.all_gather_object(told, mine, group=schedulers)
    return told
