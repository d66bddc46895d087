"""A draft is not the answer, whatever the task: think blocks, and answers before the last one."""

import pytest

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, load_task, task_folders

BLOCKS = (
    "<think>{}</think>",
    "{}</thought>",
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
)


def questions(name: str) -> tuple[Task, Labels, list[Example]]:
    task = load_task(name)
    [sample, *_] = sorted(task_folders()[name].glob("sample.*"))
    examples = list(Reader(task).read(sample))
    return task, task.ask.labels(examples), examples


@pytest.mark.parametrize("name", task_folders())
def test_the_last_complete_answer_counts(name: str) -> None:
    task, labels, examples = questions(name)
    for draft, example in zip([*examples[1:], examples[0]], examples, strict=True):
        first, last = task.ask.target(draft), task.ask.target(example)
        gold = task.ask.decode(last, example, labels)
        assert gold.repairs == ()
        for block in BLOCKS:
            thought = task.ask.decode(block.format(first) + last, example, labels)
            assert thought.answer == gold.answer
            assert thought.repairs == ("think block dropped",)
            cut = task.ask.decode(block.partition("{}")[0] + first, example, labels)
            assert block.startswith("{}") or cut == task.ask.decode("", example, labels)
        for between in ("\n更正：", "```\n复核后：\n```json\n", ""):
            decoded = task.ask.decode(f"{first}{between}{last}", example, labels)
            assert decoded.answer == gold.answer
            assert decoded.repairs
            assert decoded.readable
