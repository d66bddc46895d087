"""Read the judgments in a reply, whatever is around them and however labels are spelled."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import Labels, normal, snap
from panjue.prompts.plumbing.decode import (
    Found,
    flatten_forms,
    json_objects,
    load_json,
    strings_in,
)
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.articles import article_of
from panjue.prompts.tasks.judgment.penalties import GUESSED, PENALTIES, PENALTY_WORDS

KEYS = ("name", "charges", "articles", "penalty")
"""The fields of a judgment."""

TWICE = "answered twice, the last complete answer counts"


def name_in_reply(name: str) -> str:
    """Return a name in the form of replies: many tokenizers compose accents or change U+F9E1."""
    return unicodedata.normalize("NFC", neutralize(name))


def decode(reply: str, example: Example, labels: Labels) -> Decoded:
    """Find each defendant's judgment in a reply.

    Every defendant gets known labels for any reply. Every repair and every value from the fallback
    is listed. The time is linear in the length of the reply.
    """
    found, repairs = _judgments_by_place(json_objects(reply), example.names)
    judgments = []
    from_fallback = []
    for number, name in enumerate(example.names):
        person = Person(found.get(number, {}), labels)
        judgments.append({"name": name, **person.judgment()})
        from_fallback += [(number, field) for field in person.from_fallback]
        repairs += [f"{name}: {repair}" for repair in person.repairs]
    answer = {"judgments": judgments}
    if not repairs and load_json(reply) != in_reply(answer):
        repairs.append("not the JSON that was asked for")
    return Decoded(answer, tuple(repairs), readable=bool(found), from_fallback=tuple(from_fallback))


def in_reply(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in the form of a reply."""
    judgments = [{**one, "name": name_in_reply(one["name"])} for one in answer["judgments"]]
    return {"judgments": judgments}


Owners = tuple[int, ...]
"""Positions of the defendants whom a name may mean; several only if they have the same name."""

OwnersOf = Callable[[Mapping[str, Any]], Owners | None]
"""Function from an object of a reply to its owners, or None if it is no judgment."""


def _judgments_by_place(
    objects: Sequence[Found], names: Sequence[str]
) -> tuple[dict[int, Mapping[str, Any]], list[str]]:
    """Return position of a defendant -> object; of several, the last of the most complete ones.

    A name in another width, case or spacing counts if only one defendant can be meant. Defendants
    of one name are told apart by their positions in one list.
    """
    owners_of = _owners_of(names)
    judgments: dict[int, Mapping[str, Any]] = {}
    best: dict[int, tuple[bool, int]] = {}
    namesakes: Counter[Owners] = Counter()  # owners of one name -> number of their objects
    repairs = []
    for value, is_whole in objects:
        owners = owners_of(value)
        if owners is None:
            continue
        if not owners:
            repairs.append(f"name {value['name'][:40]!r} is no defendant, dropped")
            continue
        if len(owners) > 1:
            namesakes[owners] += 1
            continue
        [place] = owners
        if place in judgments:
            repairs.append(f"{names[place]}: {TWICE}")
        completeness = (is_whole, len(value.keys() & KEYS))
        if completeness >= best.get(place, completeness):
            best[place] = completeness
            judgments[place] = value
    for owners, n_objects in namesakes.items():
        name = names[owners[0]]
        own = _in_one_list(objects, owners, owners_of)
        judgments.update(zip(owners, own, strict=False))  # a cut reply has fewer
        if not own:
            repairs.append(f"{name}: {len(owners)} of this name cannot be told apart, dropped")
        elif n_objects > len(own):
            repairs.append(f"{name}: {TWICE}")
    return judgments, repairs


def _owners_of(names: Sequence[str]) -> OwnersOf:
    """Return a function that finds the owners of an object: the positions of its name in the case.

    It returns no positions if nobody has the name, or if it fits two names. It returns None if the
    object is no judgment, because it says nothing.
    """
    exact = _by_form(name_in_reply, names)
    similar = _by_form(_loose, names)

    def owners(value: Mapping[str, Any]) -> Owners | None:
        written = value.get("name")
        has_only_a_name = len(value.keys() & KEYS) == 1
        if not isinstance(written, str) or has_only_a_name:
            return None
        places = exact.get(name_in_reply(written)) or similar.get(_loose(written), [])
        forms = {name_in_reply(names[place]) for place in places}
        return tuple(places) if len(forms) == 1 else ()

    return owners


def _in_one_list(
    objects: Sequence[Found], owners: Owners, owners_of: OwnersOf
) -> list[Mapping[str, Any]]:
    """Return the objects of `owners` from a list with one for each: the last most complete list.

    A list may have fewer only if the reply ends within it, because the others would have followed.
    """
    is_whole = {id(found.value): found.is_whole for found in objects}
    lists = []
    for found in objects:
        if isinstance(found.value.get("judgments"), list):
            lists.append((found.value["judgments"], found.is_whole))
    if not lists:  # without a grammar, a model may write a bare list
        lists = [([found.value for found in objects], all(is_whole.values()))]
    best = (0, False, 0)
    most_complete: list[Mapping[str, Any]] = []
    for items, has_end in lists:
        own: list[Mapping[str, Any]] = []
        for item in items:
            if isinstance(item, dict) and owners_of(item) == owners:
                own.append(item)
        if len(own) > len(owners) or (has_end and len(own) < len(owners)):
            continue
        are_whole = all(is_whole[id(item)] for item in own)
        completeness = (len(own), are_whole, sum(len(item.keys() & KEYS) for item in own))
        if completeness >= best:
            best = completeness
            most_complete = own
    return most_complete


def _by_form(form: Callable[[str], str], names: Sequence[str]) -> dict[str, list[int]]:
    """Return form -> positions of the names that have it; `form` returns the form of a name."""
    forms: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        forms.setdefault(form(name), []).append(place)
    return forms


def _loose(name: str) -> str:
    """Return a name without width, case and spacing."""
    return "".join(flatten_forms(name).split()).casefold()


class Person:
    """One defendant's judgment, with its repairs and its fields from the fallback."""

    def __init__(self, found: Mapping[str, Any], labels: Labels) -> None:
        """Set the person's object in the reply; it may be empty."""
        self._found = found
        self._labels = labels
        self.repairs: list[str] = []
        self.from_fallback: list[str] = []

    def judgment(self) -> dict[str, Any]:
        """Read the judgment; missing parts get the commonest labels."""
        known_charges = self._labels.normal_forms.get("charges", {})
        charges = self._read_labels("charges", lambda text: snap(text, known_charges))
        with_charge: set[str] = set()
        for charge in charges:
            with_charge.update(self._labels.pairs.get(charge, ()))
        known = self._labels.normal_forms.get("articles", {})
        articles = self._read_labels("articles", lambda text: article_of(text, known, with_charge))
        penalty = self._read_penalty()
        if not self._found:
            self.repairs = ["no answer"]
        charges = charges or self._commonest("charges")
        return {
            "charges": charges,
            "articles": articles or self._articles_of(charges),
            "penalty": penalty or self._labels.commonest("penalty") or PENALTIES[GUESSED],
        }

    def _read_labels(self, field: str, label_of: Callable[[str], str | None]) -> list[str]:
        most = self._labels.most.get(field, 0)
        exact = self._labels.counts.get(field, {})
        read: list[str] = []
        # Limit an endless list: no answer needs many more labels than those in training.
        for written in strings_in(self._found.get(field))[: 4 * most]:
            label = written if written in exact else label_of(written)
            if label is None:
                self.repairs.append(f"{field} {written[:40]!r} unknown, dropped")
                continue
            if label != written:
                self.repairs.append(f"{field} {written[:40]!r} -> {label!r}")
            if label in read:
                self.repairs.append(f"{field} {label!r} repeated")
            else:
                read.append(label)
        if len(read) > most:
            self.repairs.append(f"{field} cut to {most}, the most in training")
        if not read:
            self.repairs.append(f"{field} missing")
            self.from_fallback.append(field)
        return read[:most]

    def _read_penalty(self) -> str:
        """Return the penalty class of an object; empty if it names none or several."""
        written = strings_in(self._found.get("penalty"))
        read = {text: PENALTY_WORDS.get(normal(text)) for text in written}
        named = set(filter(None, read.values()))
        if len(named) != 1:
            self.repairs.append("penalty missing or of no class")
            self.from_fallback.append("penalty")
            return ""
        for text, penalty in read.items():
            if penalty is None:  # such as an accessory penalty
                self.repairs.append(f"penalty {text[:40]!r} unknown, dropped")
            elif penalty != text:
                self.repairs.append(f"penalty {text[:40]!r} -> {penalty!r}")
        return named.pop()

    def _commonest(self, field: str) -> list[str]:
        label = self._labels.commonest(field)
        return [label] if label else []

    def _articles_of(self, charges: Sequence[str]) -> list[str]:
        """Return the commonest article of each charge in training, or else the commonest of all."""
        articles = []
        for charge in charges:
            article = next(iter(self._labels.pairs.get(charge, ())), None)
            if article and article not in articles:
                articles.append(article)
        return articles[: self._labels.most.get("articles", 0)] or self._commonest("articles")
