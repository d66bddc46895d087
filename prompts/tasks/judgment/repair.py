"""Read the judgments in a reply, whatever is around them and however labels are spelled.

A judgment is an object of the reply with the name of a defendant. What it lacks comes from the
fallback, mostly the commonest labels in training; articles follow from the charges.
`Labels.most` limits the length of a list of labels: a defendant gets at most as many charges or
articles as any defendant in training.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decoded, Example
from panjue.prompts.labels import Labels, normal, snap
from panjue.prompts.plumbing.decode import Found, flatten_forms, json_objects, load_json, strings_in
from panjue.prompts.render import neutralize
from panjue.prompts.tasks.judgment.articles import article_of
from panjue.prompts.tasks.judgment.penalties import GUESSED, PENALTIES, PENALTY_WORDS

KEYS = ("name", "charges", "articles", "penalty")
"""The fields of a judgment."""

TWICE = "answered twice, the last complete answer counts"


def name_in_reply(name: str) -> str:
    """Return a name as schema and replies write it: `<李>` -> `＜李>`, as the prompt writes it.

    Characters with two code points, such as 李 (U+F9E1, U+674E), get the usual one (NFC). Many
    tokenizers cannot write the other one.
    """
    return unicodedata.normalize("NFC", neutralize(name))


def decode(reply: str, example: Example, labels: Labels) -> Decoded:
    """Find each defendant's judgment in a reply.

    Every defendant gets known labels for any reply. Every repair and every value from the fallback
    is listed. The time is linear in the length of the reply.
    """
    found, repairs = _judgments_by_position(json_objects(reply), example.names)
    judgments = []
    from_fallback = []
    for position, name in enumerate(example.names):
        person = Person(found.get(position, {}), labels)
        judgments.append({"name": name, **person.judgment()})
        from_fallback += [(position, field) for field in person.from_fallback]
        repairs += [f"{name}: {repair}" for repair in person.repairs]
    answer = {"judgments": judgments}
    if not repairs and load_json(reply) != in_reply(answer):
        repairs.append("not the JSON that was asked for")
    return Decoded(answer, tuple(repairs), readable=bool(found), from_fallback=tuple(from_fallback))


def in_reply(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as a reply writes it: with the names of `name_in_reply`, such as `＜李>`."""
    judgments = [{**one, "name": name_in_reply(one["name"])} for one in answer["judgments"]]
    return {"judgments": judgments}


Positions = tuple[int, ...]
"""Positions in the case of the defendants with the name in an object of a reply: (0,).

They are several if defendants have the same name, and empty if no defendant has it."""

PositionsOf = Callable[[Mapping[str, Any]], Positions | None]
"""Function from an object of a reply to its positions, or None if it is no judgment."""


def _judgments_by_position(
    objects: Sequence[Found], names: Sequence[str]
) -> tuple[dict[int, Mapping[str, Any]], list[str]]:
    """Return position of a defendant -> object in the reply, and the repairs.

    If a defendant has several objects, the most complete one counts; among equally complete ones,
    the last. A name in another width, case or spacing counts if only one defendant can be meant.
    Namesakes, defendants with the same name, are told apart by their order in one list.
    """
    positions_of = _finder(names)
    judgments: dict[int, Mapping[str, Any]] = {}
    best: dict[int, tuple[bool, int]] = {}  # position -> completeness of its object in `judgments`
    namesakes: Counter[Positions] = Counter()  # positions of namesakes -> number of their objects
    repairs = []
    for value, is_whole in objects:
        positions = positions_of(value)
        if positions is None:  # no judgment, such as the object around all judgments
            continue
        if not positions:
            repairs.append(f"name {value['name'][:40]!r} is no defendant, dropped")
            continue
        if len(positions) > 1:
            namesakes[positions] += 1
            continue
        [position] = positions
        is_first = position not in judgments
        if not is_first:
            repairs.append(f"{names[position]}: {TWICE}")
        completeness = (is_whole, len(value.keys() & KEYS))
        if is_first or completeness >= best[position]:
            best[position] = completeness
            judgments[position] = value
    for positions, n_objects in namesakes.items():
        name = names[positions[0]]
        own = _in_one_list(objects, positions, positions_of)
        # The first object is that of the first namesake. A reply that was cut has fewer objects.
        judgments.update(zip(positions, own, strict=False))
        if not own:
            repairs.append(f"{name}: {len(positions)} of this name cannot be told apart, dropped")
        elif n_objects > len(own):
            repairs.append(f"{name}: {TWICE}")
    return judgments, repairs


def _finder(names: Sequence[str]) -> PositionsOf:
    """Return a function from an object of a reply to the positions of the defendants it names.

    They are an empty tuple if no defendant has the name, or if it is similar to several different
    names: `ａ` to `a` and `A`. The function returns None for an object that is no judgment, since
    it has no name, or has nothing but a name.
    """
    exact = _by_form(name_in_reply, names)
    similar = _by_form(_loose, names)

    def positions_of(value: Mapping[str, Any]) -> Positions | None:
        written = value.get("name")
        if not isinstance(written, str) or value.keys().isdisjoint(KEYS[1:]):
            return None
        positions = exact.get(name_in_reply(written)) or similar.get(_loose(written), [])
        meant = {name_in_reply(names[position]) for position in positions}
        return tuple(positions) if len(meant) == 1 else ()

    return positions_of


def _in_one_list(
    objects: Sequence[Found], positions: Positions, positions_of: PositionsOf
) -> list[Mapping[str, Any]]:
    """Return the objects of namesakes in order, such as two 李某; empty if that is uncertain.

    `positions` are those of the namesakes in the case. If 李某 is at (0, 2), a list must have two
    objects of 李某: the first is of defendant 0, the second of defendant 2. If the reply is cut off
    within a list, the last ones may be missing there. If there are several such lists, the most
    complete one counts; among equally complete ones, the last.
    """
    # By identity: of two equal objects, one may be cut. `objects` includes the items of all lists.
    is_whole = {id(found.value): found.is_whole for found in objects}
    lists = []
    for found in objects:
        if isinstance(found.value.get("judgments"), list):
            lists.append((found.value["judgments"], found.is_whole))
    if not lists:  # without a grammar, a model may write a bare list
        lists = [([found.value for found in objects], all(is_whole.values()))]
    best = (0, False, 0)  # completeness of `most_complete`, which is empty at first
    most_complete: list[Mapping[str, Any]] = []
    for items, has_end in lists:
        own: list[Mapping[str, Any]] = []
        for item in items:
            if isinstance(item, dict) and positions_of(item) == positions:
                own.append(item)
        has_too_many = len(own) > len(positions)
        has_too_few = has_end and len(own) < len(positions)
        if has_too_many or has_too_few:
            continue
        are_whole = all(is_whole[id(item)] for item in own)
        n_fields = sum(len(item.keys() & KEYS) for item in own)
        completeness = (len(own), are_whole, n_fields)
        if completeness >= best:
            best = completeness
            most_complete = own
    return most_complete


def _by_form(form: Callable[[str], str], names: Sequence[str]) -> dict[str, list[int]]:
    """Return form -> positions of the names that have it; `form` returns the form of a name."""
    forms: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        forms.setdefault(form(name), []).append(position)
    return forms


def _loose(name: str) -> str:
    """Return a name without width, case and spacing: `Ａ 某` -> `a某`."""
    return "".join(flatten_forms(name).split()).casefold()


class Person:
    """One defendant's judgment, with its repairs and its fields from the fallback."""

    def __init__(self, given: Mapping[str, Any], labels: Labels) -> None:
        """Set the person's object in the reply; it is empty if the reply has none."""
        self._given = given
        self._labels = labels
        self.repairs: list[str] = []
        self.from_fallback: list[str] = []

    def judgment(self) -> dict[str, Any]:
        """Read the judgment; replace what is missing by the commonest labels in training.

        Missing articles become those of the charges.
        """
        known_charges = self._labels.normal_forms.get("charges", {})
        charges = self._read_labels("charges", lambda text: snap(text, known_charges))
        with_charge: set[str] = set()
        for charge in charges:
            with_charge.update(self._labels.pairs.get(charge, ()))
        known = self._labels.normal_forms.get("articles", {})
        articles = self._read_labels("articles", lambda text: article_of(text, known, with_charge))
        penalty = self._read_penalty()
        if not self._given:
            self.repairs = ["no answer"]  # instead of one for each missing field
        charges = charges or self._commonest("charges")
        return {
            "charges": charges,
            "articles": articles or self._articles_of(charges),
            # `GUESSED` is for labels without any penalty
            "penalty": penalty or self._labels.commonest("penalty") or PENALTIES[GUESSED],
        }

    def _read_labels(self, field: str, label_of: Callable[[str], str | None]) -> list[str]:
        """Return the labels of a field, each once; `label_of` finds the label of a spelling."""
        most = self._labels.most.get(field, 0)
        exact = self._labels.counts.get(field, {})
        read: list[str] = []
        # Limit an endless list: no answer needs many more labels than those in training.
        for written in strings_in(self._given.get(field))[: 4 * most]:
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
        written = strings_in(self._given.get("penalty"))
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
        """Return the commonest label of a field in training, if there is any."""
        label = self._labels.commonest(field)
        return [label] if label else []

    def _articles_of(self, charges: Sequence[str]) -> list[str]:
        """Return the commonest article of each charge in training, or else the commonest of all."""
        most = self._labels.most.get("articles", 0)
        articles = []
        for charge in charges:
            article = next(iter(self._labels.pairs.get(charge, ())), None)
            if article and article not in articles:
                articles.append(article)
        return articles[:most] or self._commonest("articles")
