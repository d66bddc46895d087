"""What every task must keep to. A new task is covered at once: its folder has a `sample.*`."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.eval.metric_values import metric_values, pooled
from panjue.eval.shown import items_of
from panjue.finetune.classifier.opinions import Advisor
from panjue.prompts import render, tasks
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, load_task, task_folders
from panjue.prompts.tasks.classes import Classes
from tests.records import believing


def sample_of(name: str) -> tuple[Task, list[Example], Labels]:
    """Return a task, the examples of its sample, and their labels."""
    task = load_task(name)
    samples = sorted(task_folders()[name].glob("sample.*"))
    assert samples, f"put a few invented examples into prompts/tasks/{name}/sample.jsonl"
    examples = list(Reader(task).read(samples[0]))
    return task, examples, task.ask.labels(examples)


def check_task(name: str) -> None:
    """Check what training, serving and scoring expect of a task."""
    task, examples, labels = sample_of(name)
    assert len(examples) > 1
    assert task.answer.fields or not render.names_opinions(name)
    for draft, example in zip([*examples[1:], examples[0]], examples, strict=True):
        check_prompt(task, example)
        check_gold(task, example, labels)
        check_thinking(task, example, task.ask.target(draft), labels)
        check_any_reply(task, example, labels)


def check_prompt(task: Task, example: Example) -> None:
    for message in task.ask.prompt(example):
        assert message["role"] in {"system", "user", "assistant"}
        assert message["content"] == render.neutralize(message["content"])


def check_gold(task: Task, example: Example, labels: Labels) -> None:
    """The gold reply is valid, is read without loss, scores 1.0 and would be accepted."""
    assert example.answer is not None
    schema = task.ask.schema(example, labels)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(task.ask.target(example)))
    decoded = task.ask.decode(task.ask.target(example), example, labels)
    assert (decoded.answer, decoded.repairs) == (example.answer, ())
    assert decoded.readable
    row = task.data.write(example, decoded.answer)
    assert row["id"] == example.id
    assert list(task.data.check(example, row, labels)) == []
    gold, alone = task.gold(example), np.array(1.0)
    perfect = pooled(task, metric_values(task, gold, row, ""), alone)
    # FairLex's macro F1 of label sets counts a class that is absent as 0.
    is_over_all = [name == "macro_f1" and bool(task.answer.sets) for name in task.score.names]
    assert perfect[~np.array(is_over_all)] == pytest.approx(1.0)
    unanswered = pooled(task, metric_values(task, gold, None, ""), alone)
    assert ((unanswered >= 0) & (unanswered < 1)).all()
    assert task.score.weight(example) >= 0
    assert list(items_of(task, task.as_gold(row), row)), "a report shows it without gold"


def check_thinking(task: Task, example: Example, draft: str, labels: Labels) -> None:
    """A draft in a think block is no answer, and neither is what follows in a block without end."""
    target = task.ask.target(example)
    thought = task.ask.decode(f"<think>{draft}</think>{target}", example, labels)
    assert (thought.answer, thought.repairs) == (example.answer, ("think block dropped",))
    cut = task.ask.decode(f"<think>{draft}{target}", example, labels)
    assert cut.answer == task.ask.decode("", example, labels).answer


def check_any_reply(task: Task, example: Example, labels: Labels) -> None:
    """Whatever the reply is, there is an answer that the contest would accept.

    Also where a classifier answers what the reply leaves out.
    """
    counts = {name: task.answer.counts(name, labels.counts) for name in task.answer.fields}
    advisor = Advisor(task, labels, believing(task, counts)) if counts else None
    opinions = advisor.opinions(example) if advisor else []

    @settings(max_examples=60)
    @given(replies(task.ask.target(example)))
    def answers(reply: str) -> None:
        decoded = task.ask.decode(reply, example, labels)
        completed = advisor.complete(decoded, opinions) if advisor else decoded.answer
        for answer in (decoded.answer, completed):
            row = task.data.write(example, answer)
            assert list(task.data.check(example, row, labels)) == []
            dump(row).encode("utf-8")
        assert (completed == decoded.answer) or decoded.repairs
        told = advisor.confidence(decoded, completed, opinions, {}) if advisor else []
        assert all(0 <= chance <= 1 for item in told for chance in item.values())

    answers()


def replies(target: str) -> st.SearchStrategy[str]:
    """Arbitrary text, arbitrary JSON, and the gold reply with a hole or foreign text in it."""
    words = st.text() | st.integers() | st.none() | st.booleans() | st.floats()
    values = st.recursive(
        words, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    )
    place = st.integers(0, len(target))
    torn = st.builds(lambda a, b, text: target[:a] + text + target[b:], place, place, st.text())
    escaped = st.text().map(lambda text: json.dumps({"answers": [text], "answer": text}))
    half = st.builds(lambda a: target[:a] + "\\ud800" + target[a:], place)
    return st.text() | st.builds(dump, values) | torn | escaped | half


@pytest.mark.parametrize("name", task_folders())
def test_every_task_keeps_to_the_rules(name: str) -> None:
    check_task(name)


BETWEEN = ["\n更正：", "```\n复核后：\n```json\n", ""]


@pytest.mark.parametrize("name", task_folders())
@pytest.mark.parametrize("between", BETWEEN)
def test_the_last_complete_answer_counts(name: str, between: str) -> None:
    task, examples, labels = sample_of(name)
    for draft, example in zip([*examples[1:], examples[0]], examples, strict=True):
        reply = f"{task.ask.target(draft)}{between}{task.ask.target(example)}"
        decoded = task.ask.decode(reply, example, labels)
        assert decoded.answer == example.answer
        assert decoded.repairs
        assert decoded.readable


TOY = '''
"""Is a remark kind? A toy that shows how little a task is."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from panjue.prompts.example import Answer, Decoded, Example, LabelFields
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import last_object, load_json
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Schema, Score, Task, closed_object, id_of, text_of
from panjue.prompts.tasks.metrics import Row

KINDS = ["no", "yes"]


def read(row: Mapping[str, Any]) -> Example:
    answer = {"kind": row["kind"]} if "kind" in row else None  # test rows have none
    return Example(id_of(row), text_of(row, "text"), answer=answer)


def schema(example: Example, labels: Labels) -> Schema:
    return closed_object({"kind": {"enum": KINDS}})


def decode(reply: str, example: Example, labels: Labels) -> Decoded:
    kind = last_object(reply, ["kind"]).value.get("kind")
    if kind not in KINDS:
        fallback = labels.commonest("kind") or KINDS[0]
        return Decoded({"kind": fallback}, ("no kind",), readable=False)
    is_as_asked = load_json(reply) == {"kind": kind}
    return Decoded({"kind": kind}, () if is_as_asked else ("not the JSON that was asked for",))


def write(example: Example, answer: Answer) -> dict[str, object]:
    return {"id": example.id, **answer}


def accuracy(gold: Row, row: Row | None) -> float:
    return float(row is not None and row["kind"] == gold["kind"])


TASK = Task(
    data=Data(read=read, write=write),
    ask=Ask(prompt=partial(render, "toy"), schema=schema, decode=decode),
    score=Score(metrics=(accuracy,)),
    answer=LabelFields(classes=("kind",), order={"kind": KINDS}),
)
'''
TOY_SAMPLE = (
    '{"id":1,"text":"谢谢 <|im_end|> {x}","kind":"yes"}\n{"id":2,"text":"走开","kind":"no"}\n'
)


def add_toy(place: Path, monkeypatch: pytest.MonkeyPatch, code: str = TOY) -> Path:
    """Add the toy to the tasks of a test, and return its sample."""
    folder = place / "toy"
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(code, "utf-8")
    (folder / "prompt.md").write_text("友善吗？{text}", "utf-8")
    (folder / "sample.jsonl").write_text(TOY_SAMPLE, "utf-8")
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(place)])
    for name in ("toy", "toy.task"):
        monkeypatch.delitem(sys.modules, f"{tasks.__name__}.{name}", raising=False)
    importlib.invalidate_caches()
    return folder / "sample.jsonl"


def test_a_new_task_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(TOY.splitlines()) < 60
    add_toy(tmp_path, monkeypatch)
    check_task("toy")
    for between in BETWEEN:
        test_the_last_complete_answer_counts("toy", between)


def test_labels_are_counted_by_field_unless_the_task_counts_them_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_toy(tmp_path, monkeypatch)
    _, _, labels = sample_of("toy")
    assert labels == Labels({"kind": {"no": 1, "yes": 1}}, {"kind": 1})
    _, _, labels = sample_of("ecthr")  # an empty set is counted under a name of its own
    assert labels.counts["label"]["none"] == 1


def test_a_closed_list_of_labels_is_known_without_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_toy(tmp_path, monkeypatch)
    assert load_task("toy").closed_labels == Labels({"kind": {"no": 0, "yes": 0}}, {"kind": 1})
    several = load_task("ecthr").closed_labels
    assert several is not None
    assert [*several.counts["label"]][:2] == ["none", "Article 2"]  # an empty set comes first
    assert several.most == {"label": 10}
    assert load_task("dialogue").closed_labels == Labels()
    assert load_task("cloze").closed_labels is None
    assert load_task("judgment").closed_labels is None
    assert load_task("judgment").open_fields == ["charges", "articles"]


def test_a_folder_without_a_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(tmp_path, monkeypatch, code="TSK = 1")
    with pytest.raises(UserError, match=r"toy/task.py: has no TASK = Task\(…\)$"):
        load_task("toy")


def test_words_in_files_of_numbers_are_told_how_to_be_read() -> None:
    numbered = Classes("urgency", ("low", "high")).task()
    with pytest.raises(UserError, match=r"found \"low\"; Classes\(…, named=True\)"):
        numbered.data.read({"id": 1, "text": "a", "label": "low"})
