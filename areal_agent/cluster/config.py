"""The config section of the machines that a run uses. Imports no Ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, IPvAnyNetwork, model_validator

from areal_agent.section import Section


def _in_units(amount: float) -> float:
    if amount > 1 and not amount.is_integer():
        raise ValueError(f"is {amount:g}; Ray takes fractions of 1 and whole numbers")
    return amount


Amount = Annotated[float, Field(gt=0), AfterValidator(_in_units)]


class ClusterConfig(Section):
    """The machines of a run: this one, or those of a Ray cluster (docs/scaling.md)."""

    kind: Literal["local", "ray"] = "local"
    """`local`: all processes run on this machine. `ray`: trainer, engines and workers run where Ray finds room for
    them; the extra `ray` has to be installed."""
    address: Annotated[str, Field(pattern=r"^(auto|[^/\s]+:\d+)$")] | None = None
    """With `kind: ray`: the cluster's head, `HOST:PORT`, or `auto` for the one that this machine belongs to. Without it
    a Ray of this machine alone is started, and ends with the run."""
    network: IPvAnyNetwork | None = None
    """With `address`: processes listen at their machine's address in this network, as in `10.0.0.0/16`; by default at
    the one that Ray uses. Whoever can listen in on it can read keys, texts and weights."""
    shared_dir: Path | None = None
    """With `kind: ray`: a folder that all machines have at this path. A folder of the run's name in it has what they
    read and write, checkpoints and new weights above all, and snapshots of the ledger, from which `--resume` goes on
    after the loss of the machine with `run_dir`. Without it all machines need `run_dir` at the same path."""
    worker_resources: Annotated[Mapping[str, Amount], Field(min_length=1)] = Field(default_factory=lambda: {"CPU": 1})
    """With `kind: ray`: what Ray reserves for each rollout worker, as in `{CPU: 4, sandbox: 1}`. `sandbox` is a
    resource of your own, with which `ray start --resources` marks the nodes that may run sandboxes."""
    placement_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """With `kind: ray`: how long a process may wait for a node that has room for it, also when it is started again,
    and the run for the cluster to let it in."""
    lost_after_s: Annotated[float, Field(ge=1)] = 10.0
    """With `kind: ray`: a process whose node has not answered for this long is taken for dead. On a
    node that is cut off it ends by itself after three times as long."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """With `kind: ray`: how often a run goes on by itself, from the last checkpoint, when its trainer dies. It then has
    as many ranks as there is room for, at most `trainer.num_ranks`."""

    @model_validator(mode="after")
    def _suits_its_kind(self) -> Self:
        default = type(self).model_construct()
        given = [name for name in type(self).model_fields if getattr(self, name) != getattr(default, name)]
        if self.kind == "local" and given:
            raise ValueError(f"cluster.{given[0]} only applies to cluster.kind ray; leave it out")
        if self.shared_dir is not None and not self.shared_dir.is_absolute():
            raise ValueError(f"cluster.shared_dir is {str(self.shared_dir)!r}; give a whole path, as on all machines")
        if self.network is not None and self.address is None:
            raise ValueError("cluster.network only applies with cluster.address; leave it out")
        return self
