"""Let atheris look for a reply that breaks the decoder: `python fuzz.py CASES -atheris_runs=N`."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["panjue.prompts.plumbing.decode", "panjue.prompts.tasks.judgment.repair"]
):
    from panjue.prompts.reader import Reader
    from panjue.prompts.task import load_task

TASK = load_task("judgment")
EXAMPLES = list(Reader(TASK).read(Path(sys.argv.pop(1))))
LABELS = TASK.ask.labels(EXAMPLES)


def one_input(data: bytes) -> None:
    """Read `data` as a reply, spliced into a good one."""
    given = atheris.FuzzedDataProvider(data)
    example = EXAMPLES[given.ConsumeIntInRange(0, min(len(EXAMPLES), 20) - 1)]
    target = TASK.ask.target(example)
    start = given.ConsumeIntInRange(0, len(target))
    end = given.ConsumeIntInRange(start, len(target))
    reply = target[:start] + given.ConsumeUnicode(2048) + target[end:]
    row = TASK.data.write(example, TASK.ask.decode(reply, example, LABELS).answer)
    faults = list(TASK.data.check(example, row, LABELS))
    assert not faults, faults


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()
