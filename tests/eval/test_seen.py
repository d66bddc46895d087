"""Cases that training has seen are counted wherever they are answered or scored."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

from panjue.eval.answers import seen_by, write_seen
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

TASK = load_task("judgment")


def test_a_training_has_seen_what_it_did_not_hold_out(trained: Path, workshop: Path) -> None:
    examples = list(Reader(TASK).read(workshop / "demo/train.jsonl"))
    is_seen = seen_by(trained / "adapter")
    assert sum(map(is_seen, examples)) == len(examples) - 10
    assert is_seen(replace(next(filter(is_seen, examples)), id="another", answer=None))
    assert not any(map(is_seen, Reader(TASK).read(workshop / "demo/test.jsonl")))
    assert not any(map(seen_by(None), examples))


def test_generate_and_score_count_them(
    answered: Path,
    workshop: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    run, test = tmp_path / "run", workshop / "demo/test.jsonl"
    shutil.copytree(answered, run)
    assert "were trained on" not in panjue("generate", answered, test).stdout
    write_seen(answered, list(Reader(TASK).read(test))[:5])
    try:
        said = panjue("generate", answered, test).stdout
        assert "5 of 24 cases were trained on; expect lower scores on others" in said
        said = panjue("score", test, answered).stdout
        assert "5 of these cases were trained on; expect lower scores on other cases" in said
    finally:
        shutil.copy(run / "seen.bin", answered / "seen.bin")
