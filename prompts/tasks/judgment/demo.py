"""Invented cases, so that a new user can run the whole pipeline without data or a model.

demo.yaml has the grammar. Charges, articles and ranges of terms are real; persons and deeds are
invented. Within its range, the term follows a rule of our own from the text. A score on these cases
shows only that the pipeline works.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, dump
from panjue.prompts.tasks.judgment.penalties import MONTHS, sentence

Crime = Mapping[str, Any]
"""A charge, its article, texts for its deeds, the name of its scale, and a range for each level."""


class Deed(NamedTuple):
    """A crime, who commits it, and its level of gravity, 0-2: a position in its scale."""

    crime: Crime
    names: Sequence[str]
    level: int
    alone: str = "单独作案"  # the role of somebody who acts alone

    @property
    def is_joint(self) -> bool:
        """Say whether there can be principals and accessories."""
        return len(self.names) > 1

    def role(self, *, leads: bool) -> str:
        """Return the role of one person: of several, or alone."""
        if not self.is_joint:
            return self.alone
        return "系主犯" if leads else "系从犯"


GRAMMAR = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
CRIME_SCENES = [f"{town}{spot}" for town in GRAMMAR["towns"] for spot in GRAMMAR["spots"]]
RECORDS = {True: "系累犯", False: "系初犯"}
LEAST, MOST = 6, 180  # months of imprisonment, article 45 of the Criminal Law
LIMITS = [LEAST - 1, *sorted(MONTHS.values())[1:], MOST]
MONTHS_BY_SEVERITY = [(over + 1, most) for over, most in pairwise(LIMITS)]
"""Months of imprisonment for severity 1-9; each is a penalty class."""
LIFE = 10
"""Severity of life imprisonment, after these; severity 0 is detention of 1-6 months."""


def _case(draw: random.Random) -> dict[str, Any]:
    """Draw a case in the official format, without `id`.

    Two or three defendants commit a crime. In a fifth of the cases, one of them also commits
    another crime, or commits it instead. The last sentences tell the role and record of each.
    """
    names = []
    for surname in draw.sample(GRAMMAR["surnames"], draw.randint(2, 3)):
        names.append(surname + draw.choice(GRAMMAR["given"]))
    shared, other = draw.sample(GRAMMAR["crimes"], 2)
    loner = draw.choice(names) if draw.random() < 0.2 else None
    commits_both = loner is not None and draw.random() < 0.5
    joint = [name for name in names if name != loner or commits_both]
    deeds = [Deed(shared, joint, level=draw.randrange(3))]
    fact = "经审理查明：" + _describe(draw, deeds[0])
    if loner:
        deeds.append(Deed(other, [loner], level=draw.randrange(3), alone="另行单独作案"))
        fact += "另查明：" + _describe(draw, deeds[1])
    leader = draw.choice(joint)  # if there are several, one is a principal
    outcomes = []
    for name in names:
        own = [deed for deed in deeds if name in deed.names]
        leads = name == leader or draw.random() < 0.2
        repeats = draw.random() < 0.3
        roles = "，".join(deed.role(leads=leads) for deed in own)
        fact += f"{name}{roles}，{RECORDS[repeats]}。"
        severity = max(_severity(deed, leads=leads, repeats=repeats) for deed in own)
        outcomes.append(_outcome(draw, name, own, severity))
    return {"fact": fact, "defendants": names, "outcomes": outcomes}


def _describe(draw: random.Random, deed: Deed) -> str:
    """Return a sentence with time, persons, deed, place, and a number that shows the gravity."""
    crime = deed.crime
    measure, low, high = GRAMMAR["scales"][crime["scale"]][deed.level]
    who = "、".join(deed.names)
    if deed.is_joint:
        who += "共同"
    year = draw.randint(2010, 2023)
    month = draw.randint(1, 12)
    day = draw.randint(1, 28)
    action = draw.choice(crime["deeds"])
    done = action.format(place=draw.choice(CRIME_SCENES))
    amount = measure.format(n=draw.randint(low, high))
    return f"{year}年{month}月{day}日，被告人{who}{done}，{amount}。"


def _severity(deed: Deed, *, leads: bool, repeats: bool) -> int:
    """Return the severity of the sentence for one crime, by demo.yaml."""
    mild, middle, severe = GRAMMAR["sentences"][deed.crime["ranges"][deed.level]]
    is_accessory = deed.is_joint and not leads
    if is_accessory == repeats:  # neither, or one outweighs the other
        return int(middle)
    return int(mild if is_accessory else severe)


def _outcome(draw: random.Random, name: str, deeds: list[Deed], severity: int) -> dict[str, Any]:
    """Return a person's outcome. `severity` is that of the gravest crime.

    Article 69 allows that the term for several crimes equals the longest term for one of them.
    """
    if severity == 0:
        penalty = sentence(detention=draw.randint(1, 6))
    elif severity == LIFE:
        penalty = sentence(life_imprisonment=True)
    else:
        shortest, longest = MONTHS_BY_SEVERITY[severity - 1]
        penalty = sentence(imprisonment=draw.randint(shortest, longest))
    return {
        "name": name,
        "penalty": penalty,
        "charges": [deed.crime["charge"] for deed in deeds],
        "articles": [deed.crime["article"] for deed in deeds],
    }


DEMO_SIZES = {"train": 1000, "test": 200, "base": 9500}
"""Name of a file -> number of its cases; `base` is for `make base`."""


def write_demo(folder: Path, sizes: Mapping[str, int]) -> None:
    """Write `<name>.jsonl` with `sizes[name]` different cases; the bytes are always the same."""
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
