"""Dialogues through the real engine: many calls for one answer, at once, and resumed."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.example import Answer, Decoded, Example, call_key, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task, task_folders
from panjue.serve.ask import Budget, QuestionMaker
from panjue.serve.endpoint import ENDPOINT_KEY, Endpoint
from panjue.serve.engine import Engine
from panjue.serve.output import EarlierRows

TASK = load_task("dialogue")
SAMPLE = task_folders()["dialogue"] / "sample.folder"
ROOM = 16384
"""Prompt and reply of the longest request: what the engine of all tests has room for."""

SHORT = ({"max_tokens": 200},)
"""Replies of a model that has not learnt to stop: cut, and read as far as they go."""


def dialogue(turns: int, key: str = "1") -> Example:
    numbers = range(1, turns + 1)
    chat = [{"Holder": "甲乙"[n % 2], "sentence": f"好{n}。"} for n in numbers]
    return TASK.data.read({"id": key, "chat": chat})


def answer_of(task: Task, example: Example, made: list[dict[str, Any]]) -> Answer:
    """Return the answer of a dialogue from the rows of its calls."""
    by_key = {call_key(row): row for row in made}

    def reply(call: int, question: Example) -> Decoded:
        row = by_key[f"{example.id} {call}"]
        assert row["question"] == question.id
        return task.ask.decode(row["texts"][0], question, Labels())

    return run_steps(task.solving(example), reply)


def test_a_hundred_turns_come_through_whole(llm: Engine, merged: Path, rows_of: Any) -> None:
    example = dialogue(100)
    question_maker = QuestionMaker(TASK, None, merged, Budget(ROOM, ROOM))
    made = rows_of(llm, question_maker, [example], 64, passes=SHORT)
    assert len(made) == 9  # of 12 sentences each
    answer = answer_of(TASK, example, made)
    assert [one["id"] for one in answer["sentences"]] == list(range(1, 101))
    assert list(TASK.data.check(example, TASK.data.write(example, answer), None)) == []


def test_a_dialogue_is_resumed_where_it_stopped(llm: Engine, merged: Path, rows_of: Any) -> None:
    task = configured(TASK, {"window": 4})
    both = [dialogue(12, "1"), dialogue(9, "2")]
    question_maker = QuestionMaker(task, None, merged, Budget(ROOM, ROOM))
    made = rows_of(llm, question_maker, both, passes=SHORT)
    kept = {call_key(row): row for row in made[: len(made) // 2]}
    more = rows_of(llm, question_maker, both, old_rows=kept, passes=SHORT)
    assert sorted(map(call_key, more)) == sorted(call_key(row) for row in made[len(kept) :])
    for example in both:
        answer_of(task, example, [*kept.values(), *more])
    changed = {key: {**row, "question": "another"} for key, row in kept.items()}
    with pytest.raises(UserError, match="call 0 was 'another', now it is '1/1'"):
        rows_of(llm, question_maker, both, old_rows=changed, passes=SHORT)


@pytest.mark.parametrize("replies", [{"texts": []}, {"texts": None}, {"texts": [3]}, {}])
def test_an_old_row_without_a_reply_is_named(replies: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text(dump({"id": "1", "call": 0, "question": "1/1", **replies}) + "\n", "utf-8")
    problem = f"{path}: id 1: 'texts' has no reply; delete the line: `panjue generate` asks again"
    with pytest.raises(UserError, match=re.escape(problem)):
        EarlierRows(path).answered(Reader(TASK), SAMPLE, Labels())


def test_any_openai_endpoint_does_as_well(
    server: Any,
    llm: Engine,
    merged: Path,
    small: Any,
    monkeypatch: pytest.MonkeyPatch,
    rows_of: Any,
) -> None:
    """Our own server, which answers as vLLM does offline."""
    monkeypatch.setenv(ENDPOINT_KEY, server.key)
    examples = list(Reader(TASK).read(SAMPLE))
    question_maker = QuestionMaker(
        TASK, None, merged, Budget(small["max_tokens"], small["max_tokens"])
    )
    with closing(Endpoint(f"{server.url}/v1#panjue")) as vllm:
        made = rows_of(vllm, question_maker, examples, 16, passes=SHORT)
    assert all(row["completion_tokens"] > 0 for row in made)
    offline_rows = rows_of(llm, question_maker, examples, 16, passes=SHORT)
    offline = {call_key(row): row for row in offline_rows}
    prompts = [row["prompt_tokens"] == offline[call_key(row)]["prompt_tokens"] for row in made[:2]]
    assert all(prompts), "the same prompts, token for token, where no reply has gone before"
    same = [row["texts"] == offline[call_key(row)]["texts"] for row in made]
    assert sum(same) > 0.8 * len(same)  # the others hang on a near tie, or on a reply that did
