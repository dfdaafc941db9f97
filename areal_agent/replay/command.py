"""`python -m areal_agent.ledger replay`: what it prints, writes and returns."""

import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from areal_agent.errors import ConfigError
from areal_agent.replay.comparison import compare, variant_of, write_comparison
from areal_agent.replay.training import (
    Begin,
    Recording,
    Trainers,
    causes,
    fault_of_begin,
    replay,
    steps_to_make,
)

NUM_DIGITS = 12
"""Digits of a digest that are shown."""


def replay_command(
    ledger: Path,
    sessions: Path | None,
    checkpoint: Path | None,
    to: int | None,
    overrides: Sequence[Sequence[str]],
    out: Path | None,
) -> int:
    """Make the steps again and return the exit code: 1 when they differ from the run's. Raises ArealAgentError."""
    if out is not None and out.exists():
        raise ConfigError(f"--out {str(out)!r} exists; name a folder that does not exist yet")
    transformers_logging.disable_progress_bar()
    begin = Begin.of(checkpoint)
    with Recording(ledger, sessions) as recording:
        steps = steps_to_make(recording, begin, to)
        if overrides:
            variants = [variant_of(recording, one) for one in overrides]
            if out is None:
                raise ConfigError("--with needs a folder for its table and its picture: --out FOLDER")
            compared = compare(recording, begin, steps, variants, show=_show)
            print(write_comparison(compared, out))
            return 0
        return _compare_with_run(recording, begin, steps, out)


def _show(text: str) -> None:
    print(text, flush=True)


def _compare_with_run(recording: Recording, begin: Begin, steps: Sequence[int], out: Path | None) -> int:
    began_s = time.monotonic()
    with Trainers(recording, begin) as trainers:
        first = recording.step(steps[0])
        trainers.for_step(first)
        _show(f"{recording.folder}: steps {steps[0]} to {steps[-1]}, on {_machine(trainers)}")
        if fault := fault_of_begin(recording, begin, first, trainers.info):
            _show(f"DIFFERENT before step {steps[0]}: {fault}")
            return 1
        for remade in replay(recording, trainers, steps):
            number = remade.record.step
            if remade.differs:
                _show(f"DIFFERENT: step {number} made other weights than the run ({remade.weights:.{NUM_DIGITS}})")
                for cause in causes(recording, remade, trainers.info):
                    _show(f"  - {cause}")
                return 1
            _show(f"  step {number:<5} weights {remade.weights:.{NUM_DIGITS}}  as in the run  {remade.seconds:.1f} s")
        if out is not None:
            _show(f"checkpoint {trainers.save(out, steps[-1])}")
    took_s = time.monotonic() - began_s
    _show(
        f"OK: {len(steps)} steps were made again from their batches in {took_s:.1f} s, and the weights of each are "
        "those of the run, bit for bit"
    )
    return 0


def _machine(trainers: Trainers) -> str:
    numerics = trainers.info.numerics
    threads = "1 thread" if numerics["threads"] == "1" else f"{numerics['threads']} threads"
    return f"{numerics.get('gpu', numerics['processor'])}, {threads}, torch {numerics['torch']}"
