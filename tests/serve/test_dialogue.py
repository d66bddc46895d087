"""Dialogues through the real engine: many calls for one answer, at once, and resumed."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.example import Answer, Decoded, Example, call_key, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task, task_folders
from panjue.serve.ask import Asker, Budget
from panjue.serve.endpoint import ENDPOINT_KEY, Endpoint
from panjue.serve.engine import Engine

TASK = load_task("dialogue")
SAMPLE = task_folders()["dialogue"] / "sample.folder"
ROOM = 16384
"""Prompt and reply of the longest request: what the engine of all tests has room for."""

SHORT = ({"max_tokens": 200},)
"""Replies of a model that has not learnt to stop: cut, and read as far as they go."""


def dialogue(turns: int, key: str = "1") -> Example:
    chat = [{"Holder": "甲乙"[i % 2], "sentence": f"好{i}。"} for i in range(1, turns + 1)]
    return TASK.data.read({"id": key, "chat": chat})


def asker_of(task: Task, merged: Path, room: int = ROOM) -> Asker:
    return Asker(task, None, merged, Budget(room, room))


def answer_of(task: Task, example: Example, made: list[dict[str, Any]]) -> Answer:
    by_key = {call_key(row): row for row in made}
    assert len(by_key) == len(made)

    def reply(call: int, question: Example) -> Decoded:
        row = by_key[f"{example.id} {call}"]
        assert row["question"] == question.id
        return task.ask.decode(row["texts"][0] if "texts" in row else "", question, Labels())

    return run_steps(task.solving(example), reply)


def test_a_hundred_turns_come_through_whole(llm: Engine, merged: Path, rows_of: Any) -> None:
    task, example = TASK, dialogue(100)
    asker = asker_of(task, merged)
    made = rows_of(llm, asker, [example], 64, passes=SHORT)
    assert not any("refused" in row for row in made)
    assert len(made) == 9  # of 12 sentences each
    answer = answer_of(task, example, made)
    assert [one["id"] for one in answer["sentences"]] == list(range(1, 101))
    assert list(task.data.check(example, task.data.write(example, answer), None)) == []


def test_a_dialogue_is_resumed_where_it_stopped(llm: Engine, merged: Path, rows_of: Any) -> None:
    task = configured(TASK, {"window": 4})
    both = [dialogue(12, "1"), dialogue(9, "2")]
    asker = asker_of(task, merged)
    made = rows_of(llm, asker, both, passes=SHORT)
    kept = {call_key(row): row for row in made[: len(made) // 2]}
    more = rows_of(llm, asker, both, old_rows=kept, passes=SHORT)
    assert {call_key(row) for row in more} == {call_key(row) for row in made} - set(kept)
    for example in both:
        assert answer_of(
            task, example, [r for r in [*kept.values(), *more] if r["id"] == example.id]
        )
    changed = {key: {**row, "question": "another"} for key, row in kept.items()}
    with pytest.raises(UserError, match="call 0 was 'another', now it is '1/1'"):
        rows_of(llm, asker, both, old_rows=changed, passes=SHORT)


def test_a_call_that_cannot_be_asked_costs_no_other(
    llm: Engine, merged: Path, small: Any, rows_of: Any
) -> None:
    task = configured(TASK, {"window": 1})
    turns = dialogue(3).turns
    long = turns[1]._replace(sentence="长" * small["max_tokens"])
    example = replace(dialogue(3), turns=(turns[0], long, turns[2]))
    asker = asker_of(task, merged, small["max_tokens"])
    made = rows_of(llm, asker, [example], passes=SHORT)
    refused = [row["question"] for row in made if "refused" in row]
    assert refused == ["1/2"]
    assert [one["id"] for one in answer_of(task, example, made)["sentences"]] == [1, 2, 3]


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
    asker = asker_of(TASK, merged, small["max_tokens"])
    with closing(Endpoint(f"{server.url}/v1#panjue")) as vllm:
        made = rows_of(vllm, asker, examples, 16)
    assert all(row["completion_tokens"] > 0 for row in made)
    offline = {call_key(row): row for row in rows_of(llm, asker, examples, 16)}
    prompts = [row["prompt_tokens"] == offline[call_key(row)]["prompt_tokens"] for row in made[:2]]
    assert all(prompts), "the same prompts, token for token, where no reply has gone before"
    same = [row["texts"] == offline[call_key(row)]["texts"] for row in made]
    assert sum(same) > 0.8 * len(same)  # the others hang on a near tie, or on a reply that did
