"""Tries every shape, and random plays, on chat templates, and prints what became of them."""

import random
import re
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
    can_think = subject.renderer.answer_format.thinking is not None
    found = (played(subject, play) for play in shape.variants(can_think=can_think))
    return max(found, key=lambda finding: list(Verdict).index(finding.verdict))


def try_at_random(subjects: Sequence[Subject], *, num_plays: int, seed: int) -> list[str]:
    """Play at random on each template in turn. Return the smallest failing play of each template and kind of fault."""
    numbers = random.Random(seed)
    failed = dict[tuple[Subject, Verdict], Play]()
    for number in range(num_plays):
        subject, play = subjects[number % len(subjects)], random_play(numbers)
        verdict = played(subject, play).verdict
        if verdict.is_fault:
            failed[subject, verdict] = min(play, failed.get((subject, verdict), play), key=lambda one: len(one.line))
    return [_told(subject, verdict, play) for (subject, verdict), play in failed.items()]


def _told(subject: Subject, verdict: Verdict, play: Play) -> str:
    """Tell what is found with the smallest play that fails like this one."""
    smaller: Play | None = play
    while smaller is not None:
        play = smaller
        smaller = next((one for one in _smaller(play) if played(subject, one).verdict is verdict), None)
    return f"{subject.name}: {play.line}: {played(subject, play)}"


def _smaller(play: Play) -> Iterator[Play]:
    """Yield the play without one of its words, and without one of its letters. A user still begins it."""
    for part in (*re.finditer(r"\w+ ", play.line), *re.finditer(r"(?<=\w)\w", play.line)):
        line = play.line[: part.start()] + play.line[part.end() :]
        if re.match(r"([TSD]\w* )*U", line):
            yield replace(play, line=line)
