"""Tries every shape, and random plays, on chat templates, and prints what became of them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from areal_agent.conformance.playing import Finding, Verdict, played
from areal_agent.conformance.shapes import SHAPES, Play, random_play
from areal_agent.conformance.templates import Subject, templates_at_hand
from areal_agent.errors import ConfigError

_COLUMNS = (Verdict.EXACT, Verdict.PLACED, Verdict.REFUSED)


def try_templates(paths: Sequence[Path], *, num_plays: int, seed: int) -> int:
    """Print a table of shapes and verdicts, and every fault. Return 1 if there is a fault, else 0."""
    subjects, unusable, faults = list[Subject](), list[str](), list[str]()
    for name, tokenizer in templates_at_hand(paths):
        try:
            subjects.append(Subject(name, tokenizer))
        except ConfigError as error:
            unusable.append(f"not usable: {name}: {error}")
    if not subjects:
        raise ConfigError("there is no chat template that can be used; name some: --templates FILE_OR_FOLDER ...")
    print(f"| shape | {' | '.join(_COLUMNS)} |\n|{'---|' * (len(_COLUMNS) + 1)}")
    for shape in SHAPES:
        found = {subject.name: try_shape(subject, shape) for subject in subjects}
        print(_row(shape.name, {name: finding.verdict for name, finding in found.items()}), flush=True)
        faults += [f"{name}: {shape.name}: {one}" for name, one in found.items() if one.verdict.is_fault]
    faults += try_at_random(subjects, num_plays=num_plays, seed=seed)
    print(*unusable, *faults, sep="\n")
    print(f"{len(faults) or 'no'} faults: {len(subjects)} templates, {len(SHAPES)} shapes, {num_plays} random plays")
    return 1 if faults else 0


def _row(shape: str, verdicts: Mapping[str, Verdict]) -> str:
    """Return a row of the table. Without faults, the column with most templates says `all`, or else `the others`."""
    by_verdict = {verdict: [name for name in verdicts if verdicts[name] is verdict] for verdict in _COLUMNS}
    most = max(by_verdict, key=lambda verdict: len(by_verdict[verdict]))
    cells = {verdict: ", ".join(names) for verdict, names in by_verdict.items()}
    if not any(verdict.is_fault for verdict in verdicts.values()):
        cells[most] = "all" if len(by_verdict[most]) == len(verdicts) else "the others"
    return f"| {shape} | {' | '.join(cells.values())} |"


def try_shape(subject: Subject, shape: Play) -> Finding:
    """Play a shape as sent by a client, and as sampled. Return the worst finding."""
    found = (played(subject, play) for play in shape.variants())
    return max(found, key=lambda finding: list(Verdict).index(finding.verdict))


def try_at_random(subjects: Sequence[Subject], *, num_plays: int, seed: int) -> list[str]:
    """Play at random on each template in turn. Return the shortest failing play of each template and kind of fault."""
    numbers = random.Random(seed)
    failed = dict[tuple[Subject, Verdict], Play]()
    for number in range(num_plays):
        subject, play = subjects[number % len(subjects)], random_play(numbers)
        key = subject, played(subject, play).verdict
        if key[1].is_fault and (key not in failed or len(play.steps) < len(failed[key].steps)):
            failed[key] = play
    return [_told(subject, verdict, play) for (subject, verdict), play in failed.items()]


def _told(subject: Subject, verdict: Verdict, play: Play) -> str:
    """Tell the smallest play that is left of one that failed."""
    index = 0
    while index < len(play.steps):
        smaller = next((one for one in _smaller(play, index) if played(subject, one).verdict is verdict), None)
        play, index = (play, index + 1) if smaller is None else (smaller, index)
    steps = [{**step, "tools": len(step["tools"])} if "tools" in step else step for step in play.steps]
    return "\n    ".join([f"{subject.name}: {played(subject, play)}", f"{len(play.tools)} tools", *map(str, steps)])


def _smaller(play: Play, index: int) -> Iterator[Play]:
    """Yield the play without a step, and with a simpler one."""
    before, step, after = play.steps[:index], play.steps[index], play.steps[index + 1 :]
    yield replace(play, steps=[*before, *after])
    if play.tools:
        yield replace(play, tools=())
    simpler = [{"sampled": {name: 1 for name in step["sampled"] if name != habit}} for habit in step.get("sampled", ())]
    for name, values in {"content": ("", "MARK"), "reasoning_content": (None,)}.items():
        simpler += [{name: value} for value in values if step.get(name) not in (None, *values)]
    yield from (replace(play, steps=[*before, {**step, **one}, *after]) for one in simpler)
