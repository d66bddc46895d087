"""A schema per case neither hangs the engine nor fills the memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil

from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker

TASK = load_task("judgment")


def distinct(examples: list[Example]) -> Iterator[Example]:
    """Yield examples without end, no two with the same names and so the same schema."""
    for number in count():
        example = examples[number % len(examples)]
        names = tuple(f"{name}{number}" for name in example.names)
        yield replace(example, id=number, names=names, inputs={"defendants": "、".join(names)})


def resident() -> float:
    """Return the MiB of this process and of the engine's."""
    me = psutil.Process()
    return sum(p.memory_info().rss for p in (me, *me.children(recursive=True))) / 2**20


def test_memory_is_flat_over_distinct_schemas(
    llm: Any, asker: Asker, workshop: Path, full: bool, rows_of: Any
) -> None:
    examples = list(Reader(TASK).read(workshop / "demo/test.jsonl"))
    source, wanted = distinct(examples), 1000 if full else 30
    warm = len(rows_of(llm, asker, islice(source, wanted // 5), 32))
    before, answered = resident(), 0
    for row in rows_of(llm, asker, islice(source, wanted - warm), 32):
        answered += 1
        assert row["finish"] == ["stop"] or row["finish"] == ["length"], row
        assert row["texts"][0].startswith('{"judgments":[{"name":"'), row
    assert answered == wanted - warm
    grown = resident() - before
    assert grown < 64, f"{grown} MiB more after {answered} schemas"
