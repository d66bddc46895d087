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

PENALTY_WORDS = {penalty: penalty for penalty in PENALTIES} | dict.fromkeys(
    ("单处罚金", "免予刑事处罚"), PENALTIES[14]
)
"""A penalty class as a reply may write it -> the class."""

NAME_KEYS = frozenset({"name", "姓名", "被告人"})
FIELD_OF = {
    **dict.fromkeys(("charges", "charge", "罪名"), "charges"),
    **dict.fromkeys(("articles", "article", "法条", "条文"), "articles"),
    **dict.fromkeys(("penalty", "刑罚等级", "刑罚"), "penalty"),
}
"""A key as a reply may write it -> the field of a judgment."""

KEY = re.compile("|".join((*NAME_KEYS, *FIELD_OF)))
SEPARATORS = re.compile(r"[、,，;；]")


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
    segments, repairs = _assign(objects, names)
    judgments = []
    guesses = []
    for number, name in enumerate(names):
        judgment, notes, guessed = _judge(name, segments.get(name), labels)
        judgments.append(judgment)
        guesses += [(number, field) for field in guessed]
        repairs += [f"{name}: {note}" for note in notes]
    return Decoded(
        {"judgments": judgments},
        tuple(repairs) or ("not the JSON that was asked for",),
        readable=bool(segments),
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
    for found in Scanner(text, NAME_KEYS, KEY).objects():
        given: dict[str, list[list[str]]] = {}
        for key, values in found.fields:
            if field := FIELD_OF.get(flatten_forms(key)):
                given.setdefault(field, []).append(values)
        if found.names and given:
            said.append(Said(found.names, given, found.is_closed and len(given) == 3))
    return said


def _assign(objects: Sequence[Said], names: Sequence[str]) -> tuple[dict[str, Said], list[str]]:
    """Give each defendant their object: of several the last complete one, else the first.

    A name in another width, case or spacing counts if it can be one defendant's alone.
    """
    exact, similar = (_by_form(form, names) for form in (name_in_reply, _loose))
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


class Judged(NamedTuple):
    """One defendant's judgment, what was repaired in it, and its fields that the reply lacks."""

    judgment: dict[str, Any]
    notes: list[str]
    guessed: list[str]


def _judge(name: str, said: Said | None, labels: Labels) -> Judged:
    """Read one defendant's object; missing parts get the commonest labels."""
    charges, repairs = _labels_in(said, "charges", labels)
    with_charge = {article for charge in charges for article in labels.pairs.get(charge, ())}
    articles, article_repairs = _labels_in(said, "articles", labels, with_charge)
    penalty, penalty_repairs = _penalty_in(said)
    repairs += [*article_repairs, *penalty_repairs]
    if said is None:
        repairs = ["no answer"]
    read = {"charges": charges, "articles": articles, "penalty": penalty}
    guessed = [field for field, value in read.items() if not value]
    charges = charges or _commonest(labels, "charges")
    judgment = {
        "name": name,
        "charges": charges,
        "articles": articles or _articles_of(charges, labels),
        "penalty": penalty or labels.commonest("penalty") or PENALTIES[10],
    }
    return Judged(judgment, repairs, guessed)


def _labels_in(
    said: Said | None, field: str, labels: Labels, with_charge: Container[str] = ()
) -> tuple[list[str], list[str]]:
    most = labels.most.get(field, 0)
    values, repairs = _values_of(said, field)
    exact, known = labels.counts.get(field, {}), labels.normal_forms.get(field, {})
    read: dict[str, None] = {}
    # Limits a runaway list: no answer needs many more labels than those in training.
    for written in _split_joined(values[: 4 * most], field, known):
        label: str | None = written
        if written not in exact and field == "articles":
            label = article_of(written, known, with_charge)
        elif written not in exact:
            label = snap(written, known)
        if label != written:
            repairs.append(
                f"{field} {written[:40]!r} -> {label!r}"
                if label
                else f"{field} {written[:40]!r} unknown, dropped"
            )
        if label in read:
            repairs.append(f"{field} {label!r} repeated")
        if label:
            read[label] = None
    if len(read) > most:
        repairs.append(f"{field} cut to {most}, the most in training")
    if not read:
        repairs.append(f"{field} missing")
    return list(read)[:most], repairs


def _values_of(said: Said | None, field: str) -> tuple[list[str], list[str]]:
    """Return the values of a field; none if it is given twice, since they may be others'."""
    given = said.given.get(field, [[]]) if said else [[]]
    if any(values != given[0] for values in given):
        return [], [f"{field} given {len(given)} times, dropped"]
    return given[0], [f"{field} repeated"] * (len(given) > 1)


def _split_joined(entries: Sequence[str], field: str, known: Mapping[str, str]) -> list[str]:
    """Split the entries that join several labels, such as `264、263`.

    A single charge may contain a 、: 盗窃、抢夺国家机关公文罪 is no 盗窃罪. So an entry of charges
    is split only if each part ends in 罪, or if all parts are known.
    """
    result: list[str] = []
    for entry in entries:
        parts = [part for part in SEPARATORS.split(entry) if part.strip()]
        are_charges = all(part.rstrip().endswith("罪") for part in parts)
        is_joined = are_charges or all(normal(part) in known for part in parts)
        if field == "articles":  # `normal` drops the 、: 25、1 would become 251
            is_single = article_of(entry, known) is not None
        else:
            is_single = normal(entry) in known or not is_joined
        result += [entry] if is_single else parts
    return result


def _penalty_in(said: Said | None) -> tuple[str, list[str]]:
    """Return the penalty class of an object, empty if it names none or several, and the repairs."""
    values, repairs = _values_of(said, "penalty")
    read = {written: _class_of(written) for written in values}
    named = {penalty for penalty in read.values() if penalty}
    if len(named) != 1:
        return "", [*repairs, "penalty missing or of no class"]
    for written, penalty in read.items():
        if not penalty:
            repairs.append(f"penalty {written[:40]!r} unknown, dropped")
        elif normal(written) != penalty:
            repairs.append(f"penalty {written[:40]!r} -> {penalty!r}")
    return named.pop(), repairs


def _class_of(written: str) -> str | None:
    """Return the penalty class that a word or a number means; the 6 of 6个月 is no number."""
    number = re.fullmatch(r"第?\s*(\d{1,2})(?:\.0+)?\s*[级档类]?", flatten_forms(written).strip())
    if number and int(number[1]) < len(PENALTIES):
        return PENALTIES[int(number[1])]
    return PENALTY_WORDS.get(normal(written))


def _commonest(labels: Labels, field: str) -> list[str]:
    label = labels.commonest(field)
    return [label] if label else []


def _articles_of(charges: list[str], labels: Labels) -> list[str]:
    """Return the commonest article of each charge in training, else the commonest of all."""
    commonest = [labels.commonest("articles", labels.pairs.get(charge, {})) for charge in charges]
    articles = list(dict.fromkeys(article for article in commonest if article))
    return articles[: labels.most.get("articles", 0)] or _commonest(labels, "articles")
