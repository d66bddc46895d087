"""Invented cases, so that a new user can run the whole pipeline without data or a model.

demo.yaml has the grammar: charges and articles are real, persons and deeds are not. The penalty
follows our own rule from the text. A score on them shows that the pipeline works, nothing more.
"""

import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, dump
from panjue.prompts.tasks.judgment.penalties import MONTHS, sentence

Crime = Mapping[str, Any]
"""A charge, its article, texts for its deeds, and the name of its scale of gravity."""


class Deed(NamedTuple):
    """A crime, and its level of gravity 0-2: the place in its scale."""

    crime: Crime
    level: int


GRAMMAR = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
CRIME_SCENES = [f"{town}{spot}" for town in GRAMMAR["towns"] for spot in GRAMMAR["spots"]]
ROLES = {True: "系主犯", False: "系从犯"}
RECORDS = {True: "系累犯", False: "系初犯"}
MONTHS_BY_SEVERITY = [(over + 1, most) for over, most in pairwise(sorted(MONTHS.values()))]
"""Months of imprisonment by severity 1-6, a penalty class each; severity 0 is detention of 1-6."""


def _case(draw: random.Random) -> dict[str, Any]:
    """Draw a case in the official format, without `id`.

    Two or three defendants commit a crime; in a fifth of the cases one of them commits another
    crime too, or instead. The last sentences are each one's role and record.
    """
    names = []
    for surname in draw.sample(GRAMMAR["surnames"], draw.randint(2, 3)):
        names.append(surname + draw.choice(GRAMMAR["given"]))
    shared, other = draw.sample(GRAMMAR["crimes"], 2)
    loner = draw.choice(names) if draw.random() < 0.2 else None
    commits_both = loner is not None and draw.random() < 0.5
    joint = [name for name in names if name != loner or commits_both]
    joint_deed = Deed(shared, level=draw.randrange(3))
    deeds = {name: [joint_deed] for name in joint}
    fact = "经审理查明：" + _describe(draw, joint_deed, joint)
    if loner:
        own_deed = Deed(other, level=draw.randrange(3))
        deeds.setdefault(loner, []).append(own_deed)
        fact += "另查明：" + _describe(draw, own_deed, [loner])
    outcomes = []
    for name in names:
        leads = draw.random() < 0.5
        repeats = draw.random() < 0.3
        fact += f"{name}{ROLES[leads]}，{RECORDS[repeats]}。"
        shift = int(repeats) - int(not leads)
        outcomes.append(_outcome(draw, name, deeds[name], shift))
    return {"fact": fact, "defendants": names, "outcomes": outcomes}


def _describe(draw: random.Random, deed: Deed, names: list[str]) -> str:
    """Return a sentence: when, who, what, where, and the number that shows the gravity."""
    crime = deed.crime
    measure, low, high = GRAMMAR["scales"][crime["scale"]][deed.level]
    who = "、".join(names)
    if len(names) > 1:
        who += "共同"
    year = draw.randint(2010, 2023)
    month = draw.randint(1, 12)
    day = draw.randint(1, 28)
    action = draw.choice(crime["deeds"])
    done = action.format(place=draw.choice(CRIME_SCENES))
    amount = measure.format(n=draw.randint(low, high))
    return f"{year}年{month}月{day}日，被告人{who}{done}，{amount}。"


def _outcome(draw: random.Random, name: str, deeds: list[Deed], shift: int) -> dict[str, Any]:
    """Sentence by our rule: the severity is 1, plus two for each level (0-2) of the gravest deed.

    `shift` is added: 1 for a repeated offender, -1 for an accessory, 0 for both. So it is 0 to 6.
    """
    gravest = max(deed.level for deed in deeds)
    severity = 1 + 2 * gravest + shift
    if severity:
        shortest, longest = MONTHS_BY_SEVERITY[severity - 1]
        penalty = sentence(imprisonment=draw.randint(shortest, longest))
    else:
        penalty = sentence(detention=draw.randint(1, 6))
    return {
        "name": name,
        "penalty": penalty,
        "charges": [deed.crime["charge"] for deed in deeds],
        "articles": [deed.crime["article"] for deed in deeds],
    }


DEMO_SIZES = {"train": 1000, "test": 200, "base": 12000}
"""Name of a file -> its cases; `base` is for `make base`."""


def write_demo(folder: Path, sizes: Mapping[str, int]) -> None:
    """Write `<name>.jsonl` with `sizes[name]` cases, no fact twice; always the same bytes."""
    texts: dict[Path, str] = {}
    seen: set[str] = set()
    for name, size in sizes.items():
        draw = random.Random(f"0/{name}")  # always the same cases
        lines: list[str] = []
        while len(lines) < size:
            case = _case(draw)
            if case["fact"] not in seen:
                seen.add(case["fact"])
                lines.append(dump({"id": len(lines), **case}) + "\n")
        texts[folder / f"{name}.jsonl"] = "".join(lines)
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            raise UserError(f"{path}: exists already; choose another folder")
    for path, text in texts.items():
        if not path.exists():
            with atomic_write(path) as out:
                out.write(text)
