"""What `panjue generate` says of a choice of who answers."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from panjue.finetune.trained import open_trained
from panjue.prompts import cli_generate
from panjue.prompts.plumbing.records import CHOICE, Choice
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.job import make_job
from panjue.serve.session import read_cases
from panjue.serve.settings import GenerateConfig
from tests.records import Write, believing, write_training

TASK = load_task("judgment")
FIELD = {"metric": "final", "model": 0.4, "classifier": 0.5, "low": -0.2, "high": 0.0}


def old_choice(of_charges: str) -> Choice:
    """Return a choice without the model's own probability, and with who answers the charges."""
    fields = {name: {**FIELD, "answered_by": "classifier"} for name in TASK.answer.fields}
    fields["charges"]["answered_by"] = of_charges
    found: dict[str, Any] = {"cases": 60, "counted": 60, "most": 1000, "fields": fields}
    return Choice.model_validate({**found, "calibration": {"charges": {"agree": (1, 0)}}})


@pytest.mark.parametrize("of_charges", ["model", "classifier"])
@pytest.mark.parametrize(
    ("answers", "folder"), [("", "held-out"), ("a", "held-out-a"), ("b", None)]
)
def test_a_choice_without_the_models_own_probability_is_named_with_its_answers(
    answers: str,
    folder: str | None,
    of_charges: str,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With both deleted, the next command asks again; the classifier's answers stay the same."""
    run = tmp_path / "run"
    belief = {name: {"x": 1.0, "y": 0.0} for name in TASK.answer.fields}
    write_training(run / "adapter", believing(TASK, belief))
    TASK.ask.labels([]).save(run / "adapter")
    for name in ("held-out", "held-out-a"):
        (run / "answers" / name).mkdir(parents=True)
    choice = old_choice(of_charges)
    monkeypatch.setattr(cli_generate, "choice_for", lambda *_: choice)
    monkeypatch.setattr(cli_generate, "asked_otherwise", lambda *_: "")

    test = write("test.jsonl", [{"id": 1, "fact": "甲盗窃。", "defendants": ["甲"]}])
    cases = read_cases(test, Reader(TASK), run / "answers" / (answers or "test"))
    trained = open_trained(run)
    (run / "adapter" / CHOICE).touch()
    job = make_job(run, trained, GenerateConfig.model_validate({"answers": answers}))
    said = StringIO()
    asking: Any = SimpleNamespace(job=job, console=Console(file=said, soft_wrap=True))
    assert cli_generate.decided(asking, trained, cases) == choice
    lines = [line for line in said.getvalue().splitlines() if "own probability" in line]
    if of_charges == "classifier":
        assert lines == [], "nothing would change"
        return
    [line] = lines
    places = [run / "adapter" / CHOICE]
    if folder:
        places.append(run / "answers" / folder)
    assert line.endswith(f"; to ask them again, delete {' and '.join(map(str, places))}")
