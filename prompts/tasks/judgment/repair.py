"""A judgment reply that is nearly right -> judgments: what a strict reader would throw away."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decoded
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import (
    STRING,
    field_text,
    flatten_forms,
    named_objects,
    normal,
    snap,
    strings_in,
    unquote,
)
from panjue.prompts.plumbing.files import dump
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
    "免予刑事处罚",
)
"""The penalty classes 0-14 as a reply has them: a term belongs to the class that it ends.

Words, since a base model knows what they mean; of a bare 10 it would have to learn it.
"""

NAME_KEYS = "name|姓名|被告人"
KEYS = {"charges": "charges?|罪名", "articles": "articles?|法条|条文"}
PENALTY_KEYS = "penalty|刑罚等级|刑罚"
SEPARATORS = re.compile(r"[、,，;；]")
NAME = re.compile(rf'"(?:{NAME_KEYS})"\s*+:\s*+({STRING})')


def repair(reply: str, names: Sequence[str], labels: Labels) -> Decoded:
    """Find each defendant's judgment in a reply with fences, remarks, other forms or a torn end.

    Total and linear in the reply: whatever it is, every one of `names` is answered with known
    labels, and everything that was mended or guessed is listed.
    """
    found, repairs = _assign(_segments(reply), names)
    judgments = []
    for name in names:
        judgment, mended = _judge(name, found.get(name), labels)
        judgments.append(judgment)
        repairs += [f"{name}: {text}" for text in mended]
    if not repairs:
        repairs = ["not the JSON that was asked for"]
    return Decoded({"judgments": judgments}, tuple(repairs), readable=bool(found))


def _segments(text: str) -> list[tuple[str, str]]:
    """Return (name, what is said of them): by object in JSON, else from name to name."""
    keys, plain = NAME_KEYS.split("|"), flatten_forms(text)
    # As it stands first: plain forms turn a curly quote inside a name into one that ends it.
    items = named_objects(text, keys) or named_objects(plain, keys)
    if items:
        return [(name, flatten_forms(dump(item))) for name, item in items]
    hits = list(NAME.finditer(plain))
    ends = [hit.start() for hit in hits[1:]] + [len(plain)]
    return [(unquote(hit[1]), plain[hit.end() : end]) for hit, end in zip(hits, ends, strict=False)]


def _assign(
    segments: list[tuple[str, str]], names: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Give each defendant the first segment with their name, else the one in their place."""
    forms = {flatten_forms(name): name for name in names}  # undoes `neutralize` as well
    found: dict[str, str] = {}
    repairs = []
    strangers = {}
    for place, (written, segment) in enumerate(segments):
        name = forms.get(flatten_forms(written))
        if name is None:
            strangers[place] = (written, segment)
        elif name in found:
            repairs.append(f"{name}: answered twice, the first counts")
        else:
            found[name] = segment
    for place, (written, segment) in strangers.items():
        name = names[place] if place < len(names) else None
        if name is None or name in found or len(segments) != len(names):
            repairs.append(f"name {written[:40]!r} is no defendant, dropped")
        else:
            repairs.append(f"name {written[:40]!r} -> {name!r} by its place")
            found[name] = segment
    return found, repairs


def _judge(name: str, segment: str | None, labels: Labels) -> tuple[dict[str, Any], list[str]]:
    """Read one defendant's segment; what is missing is answered by the commonest labels."""
    charges, repairs = _labels_in(segment, "charges", labels)
    articles, more = _labels_in(segment, "articles", labels)
    repairs += more
    penalty, problem = _penalty_in(segment, labels)
    repairs += [problem] if problem else []
    if segment is None:
        repairs = ["no answer, the commonest stands in"]
    charges = charges or _commonest(labels, "charges")
    articles = articles or _articles_of(charges, labels)
    return {"name": name, "charges": charges, "articles": articles, "penalty": penalty}, repairs


def _labels_in(segment: str | None, field: str, labels: Labels) -> tuple[list[str], list[str]]:
    most = labels.most.get(field, 0)
    text = segment and field_text(segment, KEYS[field])
    known = labels.normal_forms.get(field, {})
    read: dict[str, None] = {}
    repairs = []
    # A runaway list ends here: no answer needs more than a few times what training had.
    for written in _single(strings_in(text or "")[: 4 * most], field, known):
        label = article_of(written, known) if field == "articles" else snap(written, known)
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
        repairs.append(f"{field} missing, the commonest stand in")
    return list(read)[:most], repairs


def _single(written: Sequence[str], field: str, known: Mapping[str, str]) -> list[str]:
    """Split an entry that is no label but joins several, such as `264、263`.

    A charge may have a 、 of its own: 盗窃、抢夺国家机关公文罪 is no 盗窃罪. So parts are charges
    where each ends in 罪, or where all are known.
    """
    entries: list[str] = []
    for entry in written:
        parts = [part for part in SEPARATORS.split(entry) if part.strip()]
        are_charges = all(part.rstrip().endswith("罪") for part in parts)
        joins = are_charges or all(normal(part) in known for part in parts)
        if field == "articles":  # without its comma 25、1 would be 251
            is_one = article_of(entry, known) is not None
        else:
            is_one = normal(entry) in known or not joins
        entries += [entry] if is_one else parts
    return entries


def _penalty_in(segment: str | None, labels: Labels) -> tuple[str, str | None]:
    text = segment and field_text(segment, PENALTY_KEYS)
    written = next(iter(strings_in(text or "")), "")
    if normal(written) in PENALTIES:
        return normal(written), None
    # The number of a class and nothing else: the 6 of 6个月 is none.
    number = re.fullmatch(r'[\s"\[第]*(\d{1,2})(?:\.0+)?[\s"\]级档类]*', text or "")
    if number and int(number[1]) < len(PENALTIES):
        meant = PENALTIES[int(number[1])]
        return meant, f"penalty {number[1]} -> {meant!r}"
    commonest = labels.commonest("penalty") or PENALTIES[10]
    return commonest, "penalty missing or of no class, the commonest stands in"


def _commonest(labels: Labels, field: str) -> list[str]:
    label = labels.commonest(field)
    return [label] if label else []


def _articles_of(charges: list[str], labels: Labels) -> list[str]:
    """Return the article that training most often gave each charge, else the commonest of all."""
    likely = [labels.commonest("articles", labels.pairs.get(charge, {})) for charge in charges]
    known = list(dict.fromkeys(article for article in likely if article))
    return known[: labels.most.get("articles", 0)] or _commonest(labels, "articles")
