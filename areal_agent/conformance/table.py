"""Tries all shapes and random plays on templates, and prints what was found."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from areal_agent.conformance.playing import Finding, Verdict, played
from areal_agent.conformance.shapes import SHAPES, Play, random_play
from areal_agent.conformance.templates import Subject, templates_at_hand
from areal_agent.errors import ArealAgentError, ConfigError

ORDER = list(Verdict)


def try_shape(subject: Subject, shape: Play) -> Finding:
    """Play a shape as sent by a client, and as sampled. Return the worst finding."""
    findings = [replace(found, text=f"{play.name}: {found.text}") for play in shape.variants() for found in [played(subject, play)]]
    return max(findings, key=lambda finding: ORDER.index(finding.verdict))


def try_templates(paths: Sequence[Path], *, num_plays: int, seed: int) -> int:
    """Print a row for each template and each fault. Return 1 if there is one, else 0."""
    subjects = list[Subject]()
    for name, tokenizer in templates_at_hand(paths):
        try:
            subjects.append(Subject.of(name, tokenizer))
        except ConfigError as error:
            print(f"{name}: not usable: {error}")
    if not subjects:
        raise ConfigError("no installed package has a chat template; give PATHs, for example --templates models/")
    faults = list[str]()
    print("| shape | " + " | ".join(subject.name for subject in subjects) + " |")
    print("|---" * (len(subjects) + 1) + "|")
    for shape in SHAPES:
        cells = list[str]()
        for subject in subjects:
            finding = try_shape(subject, shape)
            cells.append(finding.verdict.value)
            if finding.verdict.is_fault:
                faults.append(f"{subject.name}: {finding.verdict}: {finding.text}")
        print(f"| {shape.name} | {' | '.join(cells)} |", flush=True)
    faults += try_at_random(subjects, num_plays=num_plays, seed=seed)
    print(*faults, sep="\n")
    return 1 if faults else 0


def try_at_random(subjects: Sequence[Subject], *, num_plays: int, seed: int) -> list[str]:
    numbers = random.Random(seed)
    worst: dict[tuple[str, Verdict], tuple[int, Play, Finding]] = {}
    for number in range(num_plays):
        subject, play = subjects[number % len(subjects)], random_play(numbers)
        finding = played(subject, play)
        if finding.verdict.is_fault:
            key = subject.name, finding.verdict
            if key not in worst or len(play.steps) < len(worst[key][1].steps):
                worst[key] = number, play, finding
    by_name = {subject.name: subject for subject in subjects}
    return [_told(by_name[name], verdict, *found) for (name, verdict), found in worst.items()]


def _told(subject: Subject, verdict: Verdict, number: int, play: Play, finding: Finding) -> str:
    """Tell a play that failed, with all steps left out that it needs not."""
    index = 0
    while index < len(play.steps):
        shorter = replace(play, steps=[*play.steps[:index], *play.steps[index + 1 :]])
        found = played(subject, shorter) if shorter.steps else None
        if found and found.verdict is verdict:
            play, finding = shorter, found
        else:
            index += 1
    return f"{subject.name}, play {number}: {verdict}: {finding.text}\n    {play.steps}"
