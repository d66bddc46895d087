"""Charges, articles and penalty class of every defendant (CAIL 多人多罪判决预测, data set CMDL)."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from panjue.prompts.example import Answer, Example, LabelFields
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.decode import visible
from panjue.prompts.plumbing.files import dump, read_object
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Schema, Score, Task, closed_object
from panjue.prompts.tasks.evidence import evidence
from panjue.prompts.tasks.judgment.articles import ARTICLE_ID, article_name
from panjue.prompts.tasks.judgment.metric import FINAL_PARTS, METRICS, TITLES
from panjue.prompts.tasks.judgment.penalties import BY_SEVERITY, OVER_36_MONTHS, PENALTIES
from panjue.prompts.tasks.judgment.read import FIELDS, by_hand, read
from panjue.prompts.tasks.judgment.repair import KEYS, decode, in_reply, name_in_reply

MANY_PERSONS = 50
"""In a random file with this many persons, some are sentenced to more than three years."""


def schema(example: Example, labels: Labels) -> Schema:
    """Return the JSON Schema of this case's reply.

    The label enums are in `$defs` once; inline, 63 defendants exceed llguidance's grammar limit.
    `maxItems` keeps greedy decoding from repeating a label up to the token limit. There is no
    `uniqueItems`, since no grammar backend supports it; `decode` removes duplicates.
    """
    definitions: dict[str, Schema] = {}
    for field in FIELDS:
        definitions[field] = {
            "type": "array",
            "items": {"enum": labels.names(field)},
            "minItems": 1,
            "maxItems": labels.most[field],
        }
    definitions["penalty"] = {"enum": list(PENALTIES)}
    labels_of_person = {field: {"$ref": f"#/$defs/{field}"} for field in KEYS[1:]}
    persons = []
    for name in example.names:
        persons.append(closed_object({"name": {"const": name_in_reply(name)}, **labels_of_person}))
    judgments = {
        "type": "array",
        "prefixItems": persons,
        "items": False,
        "minItems": len(example.names),
    }
    return {**closed_object({"judgments": judgments}), "$defs": definitions}


def target(example: Example) -> str:
    """Return the reply that training teaches for a case."""
    assert example.answer is not None, "a test case has no target"
    return dump(in_reply(example.answer))


def count_labels(examples: Iterable[Example]) -> Labels:
    """Collect the labels of all defendants in a training file."""
    return collect(_label_sets(examples))


def _label_sets(examples: Iterable[Example]) -> Iterator[dict[str, list[str]]]:
    """Yield field -> labels for each defendant with a judgment."""
    for example in examples:
        if example.answer is None:
            continue
        for judgment in example.answer["judgments"]:
            labels = {field: judgment[field] for field in FIELDS}
            yield {**labels, "penalty": [judgment["penalty"]]}


def doubts(labels: Labels) -> Iterator[str]:
    """Yield a line if terms seem to be years, because no sentence is above 36 months."""
    counts = labels.counts.get("penalty", {})
    persons = sum(counts.values())
    long = sum(counts.get(PENALTIES[number], 0) for number in OVER_36_MONTHS)
    if persons >= MANY_PERSONS and not long:
        yield f"none of {persons} persons has a term above 36 months; terms are months, not years"


def write(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the official submission row, with the penalty as its class 0-14."""
    names = example.given_names or example.names
    judgments = []
    for name, judgment in zip(names, answer["judgments"], strict=True):
        penalty = PENALTIES.index(judgment["penalty"])
        judgments.append({**judgment, "name": name, "penalty": penalty})
    return {"id": example.id, "judgments": judgments}


@cache
def _submission_validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(read_object(Path(__file__).with_name("submission.schema.json")))


def has_form(row: Mapping[str, Any]) -> bool:
    """Say whether a row has the form of the submission's schema, without naming a fault.

    It takes a fiftieth of the schema's time. It accepts nothing that the schema refuses. The schema
    may accept what it refuses: numbers such as 11.0.
    """
    if row.keys() != {"id", "judgments"} or type(row["id"]) not in (int, str):
        return False
    judgments = row["judgments"]
    return type(judgments) is list and all(map(_has_form, judgments))


def _has_form(judgment: Any) -> bool:
    """Say whether an entry of `judgments` has the form of the submission's schema."""
    if type(judgment) is not dict or judgment.keys() != set(KEYS):
        return False
    for field in FIELDS:
        labels = judgment[field]
        if type(labels) is not list or {*map(type, labels)} != {str}:
            return False  # nor does the schema allow an empty list, which has no types
        if len(labels) != len(set(labels)):
            return False
    penalty = judgment["penalty"]
    return type(judgment["name"]) is str and type(penalty) is int and 0 <= penalty < len(PENALTIES)


JOINED = re.compile(r"罪\s*[、，,；;/和及与\s]\s*\S")
"""Pattern of two charges in one text; 掩饰、隐瞒犯罪所得、犯罪所得收益罪 is one charge."""


@lru_cache(maxsize=10_000)
def form_fault(field: str, label: str) -> str:
    """Return why a text cannot be a label of the contest; empty if it can."""
    if label != label.strip():
        return "with a blank at an end"
    if field == "articles":
        is_id = ARTICLE_ID.fullmatch(label)
        return "" if is_id else "which is not written as articles are: 264, 303-2, 287.2"
    if JOINED.search(label):
        return "which is several charges in one text"
    return "" if label.endswith("罪") else "which does not end in 罪"


def _has_own_labels(example: Example) -> bool:
    """Say whether a label of the gold answer has another form than the contest's: `theft`."""
    for judgment in (example.answer or {}).get("judgments", ()):
        if any(form_fault(field, label) for field in FIELDS for label in judgment[field]):
            return True
    return False


def check(example: Example, row: Mapping[str, Any], labels: Labels | None) -> Iterator[str]:
    """Yield all faults of a submission row in its form, defendants and labels.

    `labels` are those of a training. Without them, labels must be written as the contest does (264,
    盗窃罪), unless the gold answer writes its own in another way.
    """
    if not has_form(row):  # the schema is slower, but names the faults
        faults = [
            f"{error.json_path}: {error.message:.200}"
            for error in _submission_validator().iter_errors(row)
        ]
        if faults:
            yield from faults
            return
    if row["id"] != example.id:
        yield f"the id is {row['id']!r}, the case has {example.id!r}"
    is_of_contest = labels is None and not _has_own_labels(example)
    for number, judgment in enumerate(row["judgments"]):
        if type(judgment["penalty"]) is not int:  # in JSON Schema, 11.0 is an integer
            yield f"$.judgments[{number}].penalty: {judgment['penalty']} is no whole number"
        for field in FIELDS:
            for label in judgment[field]:
                if label != visible(label):
                    fault = "with invisible characters"
                else:
                    fault = form_fault(field, label) if is_of_contest else ""
                if fault:
                    yield f"{judgment['name']}: {field} has {label!r}, {fault}"
    yield from _name_faults(example.given_names or example.names, row)
    if labels is not None:
        yield from _label_faults(row, labels)


def _name_faults(expected: Sequence[str], row: Mapping[str, Any]) -> Iterator[str]:
    """Yield who is missing, answered too often, or no defendant; two may have the same name."""
    names = [judgment["name"] for judgment in row["judgments"]]
    if names == list(expected):
        return
    wanted = Counter(expected)
    given = Counter(names)
    for name, n_persons in wanted.items():
        if name not in given:
            yield f"defendant {name!r} is not answered"
        elif given[name] != n_persons:
            but = f", not {n_persons}" if n_persons > 1 else ""
            yield f"defendant {name!r} is answered {given[name]} times{but}"
    for name in given:
        if name not in wanted:
            yield f"{name!r} is no defendant of this case"
    if given == wanted:
        yield "the defendants are not in the order of the case"


def _label_faults(row: Mapping[str, Any], labels: Labels) -> Iterator[str]:
    """Yield an error for each label that is not in `labels`, with the nearest one that is.

    They are the labels of a training, or of lists that the user gives (`panjue check --labels`).
    """
    for judgment in row["judgments"]:
        for field in FIELDS:
            # None: the user gave a list for the other field only, so any label may be right here.
            known = labels.counts.get(field)
            for label in judgment[field]:
                if known is not None and label not in known:
                    hint = labels.did_you_mean(field, label) if known else ""  # {}: none is near
                    yield f"{judgment['name']}: {field} has the unknown label {label!r}{hint}"


def weight(example: Example) -> float:
    """Return log2 of the number of defendants, as in the official metric; 0 for one defendant."""
    return math.log2(len(example.names))


TASK = Task(
    data=Data(read=read, write=write, check=check, by_hand=by_hand),
    ask=Ask(
        prompt=partial(render, "judgment"),
        schema=schema,
        target=target,
        decode=decode,
        labels=count_labels,
        doubts=doubts,
    ),
    score=Score(
        metrics=METRICS,
        weight=weight,
        order={"penalty": BY_SEVERITY},
        readable={"articles": article_name},
        titles=TITLES,
        fields={"charges": "charge_f1", "articles": "article_f1", "penalty": "penalty_accuracy"},
        parts=FINAL_PARTS,
    ),
    answer=LabelFields(
        "judgments",
        sets=FIELDS,
        classes=("penalty",),
        order={"penalty": PENALTIES},
        evidence=evidence,
    ),
)
