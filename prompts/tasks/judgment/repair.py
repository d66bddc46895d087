"""Read the judgments of a nearly correct reply, which a strict reader would reject."""

import re
import unicodedata
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from panjue.prompts.example import Decoded
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import flatten_forms, normal, snap
from panjue.prompts.plumbing.objects import Scanner
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.articles import article_of

PENALTIES = (
    "死刑",
    "无期徒刑",
    "拘役",
    "管制一年以上",
    "管制一年以下",
    "有期徒刑十年以上",
    "有期徒刑七年以上十年以下",
    "有期徒刑五年以上七年以下",
    "有期徒刑三年以上五年以下",
    "有期徒刑二年以上三年以下",
    "有期徒刑一年以上二年以下",
    "有期徒刑九个月以上一年以下",
    "有期徒刑六个月以上九个月以下",
    "有期徒刑六个月以下",
    "单处罚金或免予刑事处罚",
)
"""The penalty classes 0-14 as words; a term belongs to the class of which it is the upper limit.

Words, not numbers: a base model knows their meaning, but would have to learn that of a bare 10.
"""

PENALTY_WORDS = {penalty: penalty for penalty in PENALTIES}
PENALTY_WORDS["单处罚金"] = PENALTIES[14]
PENALTY_WORDS["免予刑事处罚"] = PENALTIES[14]
"""A penalty class as a reply may write it -> the class."""

NAME_KEYS = frozenset({"name", "姓名", "被告人"})

SPELLINGS = {
    "charges": ("charges", "charge", "罪名"),
    "articles": ("articles", "article", "法条", "条文"),
    "penalty": ("penalty", "刑罚等级", "刑罚"),
}
"""Field of a judgment -> its keys as a reply may write them."""

FIELD_OF = {key: field for field, keys in SPELLINGS.items() for key in keys}
REPLY_KEY = re.compile("|".join([*NAME_KEYS, *FIELD_OF]))
LABEL_SEPARATORS = re.compile(r"[、,，;；]")


def name_in_reply(name: str) -> str:
    """Return a name as replies have it: many tokenizers compose accents and change U+F9E1."""
    return unicodedata.normalize("NFC", neutralize(name))


def repair(reply: str, names: Sequence[str], labels: Labels) -> Decoded:
    """Find each defendant's judgment in a reply with fences, remarks, other forms or a cut end.

    Total and linear in the reply's length: every defendant gets known labels for any reply, and
    every repair and guess is listed.
    """
    # The original text first: in the plain text a curly quote inside a name would end the name.
    objects = _objects(reply) or _objects(flatten_forms(reply))
    assigned, repairs = _assign(objects, names)
    judgments = []
    guesses = []
    for number, name in enumerate(names):
        person = Person(name, assigned.get(name), labels)
        judgments.append(person.judgment())
        guesses += [(number, field) for field in person.guessed]
        repairs += [f"{name}: {repair}" for repair in person.repairs]
    return Decoded(
        {"judgments": judgments},
        tuple(repairs) or ("not the JSON that was asked for",),
        readable=bool(assigned),
        guesses=tuple(guesses),
    )


class Said(NamedTuple):
    """What an object says of a person."""

    names: set[str]
    given: dict[str, list[list[str]]]  # field -> its values, each time that it is given
    is_complete: bool


def _objects(text: str) -> list[Said]:
    """Return the objects that have a name and a field of a judgment."""
    said = []
    for found in Scanner(text, NAME_KEYS, REPLY_KEY).objects():
        given: dict[str, list[list[str]]] = {}
        for key, values in found.fields:
            field = FIELD_OF.get(flatten_forms(key))
            if field:
                given.setdefault(field, []).append(values)
        if found.names and given:
            said.append(Said(found.names, given, found.is_closed and len(given) == 3))
    return said


def _assign(objects: Sequence[Said], names: Sequence[str]) -> tuple[dict[str, Said], list[str]]:
    """Give each defendant their object: of several the last complete one, else the first.

    A name in another width, case or spacing counts if it can be one defendant's alone.
    """
    exact = _by_form(name_in_reply, names)
    similar = _by_form(_loose, names)
    assigned: dict[str, Said] = {}
    repairs = []
    for said in objects:
        [written, *others] = said.names
        owners = exact.get(name_in_reply(written)) or similar.get(_loose(written), set())
        if others:
            repairs.append("an object with several names, dropped")
            continue
        if len(owners) != 1:
            repairs.append(f"name {written[:40]!r} is no defendant, dropped")
            continue
        [name] = owners
        if name in assigned:
            repairs.append(f"{name}: answered twice, the last complete answer counts")
        if name not in assigned or said.is_complete:
            assigned[name] = said
    return assigned, repairs


def _by_form(form: Callable[[str], str], names: Sequence[str]) -> dict[str, set[str]]:
    forms: dict[str, set[str]] = {}
    for name in names:
        forms.setdefault(form(name), set()).add(name)
    return forms


def _loose(name: str) -> str:
    return "".join(flatten_forms(name).split()).casefold()


class Person:
    """One defendant's judgment, with what was repaired in it and the fields that are guesses."""

    def __init__(self, name: str, said: Said | None, labels: Labels) -> None:
        """Set what a reply says of the person; None if it has no object of theirs."""
        self._name = name
        self._said = said
        self._labels = labels
        self.repairs: list[str] = []
        self.guessed: list[str] = []

    def judgment(self) -> dict[str, Any]:
        """Read the judgment; missing parts get the commonest labels."""
        charges = self._read_labels("charges", ())
        with_charge = {article for one in charges for article in self._labels.pairs.get(one, ())}
        articles = self._read_labels("articles", with_charge)
        penalty = self._read_penalty()
        if self._said is None:
            self.repairs = ["no answer"]
        charges = charges or self._commonest("charges")
        return {
            "name": self._name,
            "charges": charges,
            "articles": articles or self._articles_of(charges),
            "penalty": penalty or self._labels.commonest("penalty") or PENALTIES[10],
        }

    def _values_of(self, field: str) -> list[str]:
        """Return the values of a field; none if it is given twice, since they may be others'."""
        given = self._said.given.get(field, []) if self._said else []
        if not given:
            return []
        if any(values != given[0] for values in given):
            self.repairs.append(f"{field} given {len(given)} times, dropped")
            return []
        if len(given) > 1:
            self.repairs.append(f"{field} repeated")
        return given[0]

    def _read_labels(self, field: str, with_charge: Container[str]) -> list[str]:
        most = self._labels.most.get(field, 0)
        exact = self._labels.counts.get(field, {})
        known = self._labels.normal_forms.get(field, {})
        # Limits a runaway list: no answer needs many more labels than those in training.
        values = self._values_of(field)[: 4 * most]
        read: list[str] = []
        for written in _split_joined(values, field, known):
            label: str | None = written
            if written not in exact:
                is_article = field == "articles"
                label = (
                    article_of(written, known, with_charge) if is_article else snap(written, known)
                )
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
            self.guessed.append(field)
        return read[:most]

    def _read_penalty(self) -> str:
        """Return the penalty class of an object; empty if it names none or several."""
        read = {written: _class_of(written) for written in self._values_of("penalty")}
        named = {penalty for penalty in read.values() if penalty}
        if len(named) != 1:
            self.repairs.append("penalty missing or of no class")
            self.guessed.append("penalty")
            return ""
        for written, penalty in read.items():
            if not penalty:
                self.repairs.append(f"penalty {written[:40]!r} unknown, dropped")
            elif normal(written) != penalty:
                self.repairs.append(f"penalty {written[:40]!r} -> {penalty!r}")
        return named.pop()

    def _commonest(self, field: str) -> list[str]:
        label = self._labels.commonest(field)
        return [label] if label else []

    def _articles_of(self, charges: Sequence[str]) -> list[str]:
        """Return the commonest article of each charge in training, else the commonest of all."""
        articles = []
        for charge in charges:
            article = self._labels.commonest("articles", self._labels.pairs.get(charge, {}))
            if article and article not in articles:
                articles.append(article)
        return articles[: self._labels.most.get("articles", 0)] or self._commonest("articles")


def _split_joined(entries: Sequence[str], field: str, known: Mapping[str, str]) -> list[str]:
    """Split the entries that join several labels, such as `264、263`.

    A single charge may contain a 、: 盗窃、抢夺国家机关公文罪 is no 盗窃罪. So an entry of charges
    is split only if each part ends in 罪, or if all parts are known.
    """
    result: list[str] = []
    for entry in entries:
        parts = [part for part in LABEL_SEPARATORS.split(entry) if part.strip()]
        if field == "articles":  # `normal` drops the 、: 25、1 would become 251
            is_joined = article_of(entry, known, ()) is None
        else:
            are_charges = all(part.rstrip().endswith("罪") for part in parts)
            is_joined = are_charges or all(normal(part) in known for part in parts)
            is_joined = is_joined and normal(entry) not in known
        result += parts if is_joined else [entry]
    return result


def _class_of(written: str) -> str | None:
    """Return the penalty class that a word or a number means; the 6 of 6个月 is no number."""
    number = re.fullmatch(r"第?\s*(\d{1,2})(?:\.0+)?\s*[级档类]?", flatten_forms(written).strip())
    if number and int(number[1]) < len(PENALTIES):
        return PENALTIES[int(number[1])]
    return PENALTY_WORDS.get(normal(written))
