"""No reply, however broken, stops the decoder or gets past the check."""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from tests.prompts.tasks.judgment.test_neighbours import OWN, decoded

TASK = load_task("judgment")
PIECES = [
    *'{}[]",:\\\n 0197.-罪第条款、；“”＂',
    *('"name":', '"charges":["', '"articles":["', '"penalty":', '{"judgments":[', "null", "true"),
    *("```json\n", "<think>", "</think>", "盗窃罪", "第264条第1款", "有期徒刑三年以上五年以下"),
    *("\x00", "\ufeff", "\ud800", "ﷺ", "𠮷"),
]


@pytest.fixture(scope="module")
def cases(workshop: Path) -> tuple[list[Example], Labels]:
    examples = list(Reader(TASK).read(workshop / "demo/train.jsonl"))
    return examples, TASK.ask.labels(examples)


def check(reply: str, example: Example, labels: Labels) -> None:
    row = TASK.data.write(example, TASK.ask.decode(reply, example, labels).answer)
    faults = list(TASK.data.check(example, row, labels))
    assert not faults, (reply, faults)
    json.dumps(row, ensure_ascii=False).encode("utf-8")


def mutated(reply: str, draw: random.Random) -> str:
    """Put nothing, something foreign or a repetition in place of parts of a good reply."""
    for _ in range(draw.randint(1, 6)):
        start, end = sorted(draw.randrange(len(reply) + 1) for _ in range(2))
        end = draw.choice([start, start + 1, end, len(reply)])
        piece = draw.choice(["", draw.choice(PIECES), reply[start:end] * 2])
        reply = reply[:start] + piece * draw.randint(1, 3) + reply[end:]
    return reply


def test_mutated_replies_are_answered(cases: Any, full: bool) -> None:
    examples, labels = cases
    draw = random.Random(0)
    for _ in range(120_000 if full else 2_000):
        example = draw.choice(examples)
        check(mutated(TASK.ask.target(example), draw), example, labels)


def written(row: dict[str, Any], draw: random.Random) -> str:
    """Write a judgment as models do: keys in any order, trailing commas, remarks, numbers."""
    keys = draw.sample(list(row), len(row))
    values = {key: dump(row[key]) for key in keys}
    if draw.random() < 0.3:
        values["penalty"] = str(PENALTIES.index(row["penalty"]))
    if draw.random() < 0.3 and "-" not in values["articles"]:
        values["articles"] = values["articles"].replace('"', "")
    if draw.random() < 0.3:
        values["charges"] = values["charges"].replace("]", ",]")
    if draw.random() < 0.2:
        values["name"] = json.dumps(row["name"])
    remark = draw.choice(["", "", " // 见“第三段”\n", " /* 从犯, {轻} */ "])
    space = draw.choice(["", " ", "\n  "])
    inner = f",{remark}{space}".join(f'"{key}":{space}{values[key]}' for key in keys)
    return "{" + space + inner + draw.choice(["", "", ",", remark]) + space + "}"


def reply_of(rows: Sequence[str], draw: random.Random) -> str:
    between = draw.choice([",", ",\n", "\n", ", // 下一名\n", "，另外："])
    listed = f"[{between.join(rows)}{draw.choice(['', ','])}]"
    before = draw.choice(["", "好的：", "[264]\n"])
    inside = f'{before}{{"judgments":{listed}}}'
    fenced = "\n".join(f"```json\n{row}\n```" for row in rows)
    after_others = f"法条 [264]、{{见下}}：{listed}"
    return draw.choice(["\n".join(rows), fenced, after_others, inside, inside, inside])


def test_no_mutated_reply_gives_a_value_of_another(full: bool) -> None:
    """Replies of several people in any order, with one sign of JSON wrong, or cut at one."""
    draw = random.Random(1)
    for _ in range(200_000 if full else 2_000):
        names = draw.sample(list(OWN), draw.randint(1, 5))
        rows = [written({"name": name, **OWN[name]}, draw) for name in names]
        reply = reply_of(rows, draw)
        place = draw.choice([i for i, sign in enumerate(reply) if sign in '",{}[]: \n'])
        torn = draw.choice(["", draw.choice('",{}[]:\\ \n'), reply[place : place + 1] * 2])
        reply = reply[:place] + torn + reply[place + 1 :] if draw.random() < 0.5 else reply[:place]
        decoded(reply, names)  # asserts it


def test_time_grows_with_the_length_and_not_with_its_square(cases: Any, full: bool) -> None:
    """A reply four times as long takes about four times the processor, sixteen times if squared."""
    examples, labels = cases
    draw = random.Random(0)
    seconds = {250_000: 0.0, 1_000_000: 0.0}  # of the processor, whatever else the machine does
    for piece in PIECES if full else PIECES[:6]:
        start = TASK.ask.target(examples[0])[: draw.randrange(200)]
        for length in seconds:
            began = time.process_time()
            check(start + piece * (length // len(piece)), examples[0], labels)
            seconds[length] += time.process_time() - began
    assert seconds[1_000_000] < 8 * seconds[250_000]
