from dataclasses import replace
from pathlib import Path

import pytest

from panjue.finetune.data import IGNORED, RowMaker, RowReport
from panjue.prompts.example import Example
from panjue.prompts.model import load_tokenizer
from panjue.prompts.reader import Reader
from panjue.prompts.render import prompt_ids
from panjue.prompts.task import load_task

TASK = load_task("judgment")


@pytest.fixture(scope="module")
def examples(workshop: Path) -> list[Example]:
    return list(Reader(TASK).read(workshop / "demo/train.jsonl"))


@pytest.fixture(scope="module")
def maker(workshop: Path, examples: list[Example]) -> RowMaker:
    tokenizer = load_tokenizer(workshop / "base/model")
    return RowMaker(TASK, tokenizer, TASK.ask.labels(examples), 1024)


def test_loss_is_on_the_reply_and_its_end_and_nothing_else(
    maker: RowMaker, examples: list[Example]
) -> None:
    tokenizer = maker.tokenizer
    for example, row in zip(examples, maker.rows(examples, RowReport()), strict=True):
        prompt = prompt_ids(tokenizer, TASK.ask.prompt(example))
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"][: len(prompt)] == [IGNORED] * len(prompt)
        assert row["labels"][len(prompt) :] == row["input_ids"][len(prompt) :]
        reply = tokenizer.decode(row["labels"][len(prompt) :])
        assert reply == TASK.ask.target(example) + tokenizer.eos_token
        assert tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")


def test_what_does_not_fit_is_shortened_then_refused_by_id(
    maker: RowMaker, examples: list[Example]
) -> None:
    filler = "案发当日天气晴朗。" * 200
    long = replace(examples[0], id=7, text=filler + examples[0].text)
    everybody = "、".join(examples[1].names)
    hopeless = replace(examples[1], id=8, text=f"{everybody}一同{'出行' * 2000}")
    judgments = (examples[2].answer or {})["judgments"]
    without = {"judgments": [{**judgment, "charges": []} for judgment in judgments]}
    empty = replace(examples[2], id=9, answer=without)
    report = RowReport()
    [row] = replace(maker, max_tokens=512).rows([long, hopeless, empty], report)
    assert len(row["input_ids"]) <= 512
    assert [(key, after < before) for key, before, after in report.shortened] == [("7", True)]
    assert [line.split(":")[0] for line in report.refused] == ["8", "9"]
