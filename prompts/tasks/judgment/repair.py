"""Read the judgments of a nearly correct reply, which a strict reader would reject."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from panjue.prompts.example import Decoded
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import (
    field_texts,
    flatten_forms,
    normal,
    snap,
    strings_in,
)
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.articles import article_of
from panjue.prompts.tasks.judgment.objects import Named, Scanner

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

NAME_KEYS = "name|姓名|被告人"
KEYS = {"charges": "charges?|罪名", "articles": "articles?|法条|条文"}
PENALTY_KEYS = "penalty|刑罚等级|刑罚"
SEPARATORS = re.compile(r"[、,，;；]")
KEY = re.compile("|".join((NAME_KEYS, *KEYS.values(), PENALTY_KEYS)))
FIELD = re.compile(rf'"(?:{"|".join((*KEYS.values(), PENALTY_KEYS))})"\s*+:')


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


def _objects(text: str) -> list[Named]:
    """Return the objects that have a name and a field of a judgment."""
    objects = Scanner(text, frozenset(NAME_KEYS.split("|")), KEY).objects()
    return [found for found in objects if FIELD.search(flatten_forms(found.text))]


def _assign(objects: Sequence[Named], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Give each defendant the text of the first object with their name.

    A name in another width, case or spacing counts if it can be one defendant's alone, and if that
    one has no object with the exact name.
    """
    exact, similar = (_by_form(form, names) for form in (name_in_reply, _loose))
    assigned: dict[str, str] = {}
    repairs, others = [], []
    for found in objects:
        forms = map(name_in_reply, found.names)
        owners = {name for form in forms for name in exact.get(form, ())}
        if len(found.names) > 1:
            repairs.append("an object with several names, dropped")
        elif len(owners) != 1:
            others.append(found)
        else:
            _add(assigned, owners.pop(), found, repairs)
    for found in others:
        [written] = found.names
        owners = similar.get(_loose(written), set())
        if len(owners) == 1:
            _add(assigned, next(iter(owners)), found, repairs)
        else:
            repairs.append(f"name {written[:40]!r} is no defendant, dropped")
    return assigned, repairs


def _by_form(form: Callable[[str], str], names: Sequence[str]) -> dict[str, set[str]]:
    forms: dict[str, set[str]] = {}
    for name in names:
        forms.setdefault(form(name), set()).add(name)
    return forms


def _loose(name: str) -> str:
    return "".join(flatten_forms(name).split()).casefold()


def _add(assigned: dict[str, str], name: str, found: Named, repairs: list[str]) -> None:
    if name in assigned:
        repairs.append(f"{name}: answered twice, the first counts")
    else:
        assigned[name] = flatten_forms(found.text)


class Judged(NamedTuple):
    """One defendant's judgment, what was repaired in it, and its fields that the reply lacks."""

    judgment: dict[str, Any]
    notes: list[str]
    guessed: list[str]


def _judge(name: str, segment: str | None, labels: Labels) -> Judged:
    """Read one defendant's segment; missing parts get the commonest labels."""
    charges, repairs = _labels_in(segment, "charges", labels)
    articles, article_repairs = _labels_in(segment, "articles", labels)
    penalty, penalty_repairs = _penalty_in(segment)
    repairs += [*article_repairs, *penalty_repairs]
    if segment is None:
        repairs = ["no answer, commonest labels used"]
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


def _labels_in(segment: str | None, field: str, labels: Labels) -> tuple[list[str], list[str]]:
    most = labels.most.get(field, 0)
    text, repairs = _one_text(segment, KEYS[field], field)
    known = labels.normal_forms.get(field, {})
    found: dict[str, None] = {}
    # Limits a runaway list: no answer needs many more labels than those in training.
    for written in _split_joined(strings_in(text)[: 4 * most], field, known):
        label = article_of(written, known) if field == "articles" else snap(written, known)
        if label != written:
            repairs.append(
                f"{field} {written[:40]!r} -> {label!r}"
                if label
                else f"{field} {written[:40]!r} unknown, dropped"
            )
        if label in found:
            repairs.append(f"{field} {label!r} repeated")
        if label:
            found[label] = None
    if len(found) > most:
        repairs.append(f"{field} cut to {most}, the most in training")
    if not found:
        repairs.append(f"{field} missing, commonest used")
    return list(found)[:most], repairs


def _one_text(segment: str | None, keys: str, field: str) -> tuple[str, list[str]]:
    """Return the text of a field; empty if the field has several values, which may be others'."""
    texts = field_texts(segment or "", keys)
    if len(set(texts)) > 1:
        return "", [f"{field} given {len(texts)} times, dropped"]
    return (texts or [""])[0], [f"{field} repeated"] * (len(texts) > 1)


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


def _penalty_in(segment: str | None) -> tuple[str, list[str]]:
    """Return the penalty class of a segment, empty if it has none, and the repairs."""
    text, repairs = _one_text(segment, PENALTY_KEYS, "penalty")
    written = next(iter(strings_in(text)), "")
    if penalty := PENALTY_WORDS.get(normal(written)):
        is_other = normal(written) != penalty
        return penalty, [*repairs, *[f"penalty {written!r} -> {penalty!r}"] * is_other]
    # Only the number of a class: the 6 of 6个月 is not one.
    number = re.fullmatch(r'[\s"\[第]*(\d{1,2})(?:\.0+)?[\s"\]级档类]*', text or "")
    if number and int(number[1]) < len(PENALTIES):
        penalty = PENALTIES[int(number[1])]
        return penalty, [*repairs, f"penalty {number[1]} -> {penalty!r}"]
    return "", [*repairs, "penalty missing or of no class, commonest used"]


def _commonest(labels: Labels, field: str) -> list[str]:
    label = labels.commonest(field)
    return [label] if label else []


def _articles_of(charges: list[str], labels: Labels) -> list[str]:
    """Return the commonest article of each charge in training, else the commonest of all."""
    commonest = [labels.commonest("articles", labels.pairs.get(charge, {})) for charge in charges]
    articles = list(dict.fromkeys(article for article in commonest if article))
    return articles[: labels.most.get("articles", 0)] or _commonest(labels, "articles")
