from pathlib import Path

import pytest

from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.demo import GRAMMAR, write_demo

SIZES = {"train": 400, "test": 80, "base": 300}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of invented cases."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, SIZES)
    return folder


@pytest.fixture(scope="module")
def cases(demo: Path) -> dict[str, list[Example]]:
    """Return the cases of each file, as the task reads them."""
    read = Reader(load_task("judgment")).read
    return {name: list(read(demo / f"{name}.jsonl")) for name in SIZES}


def test_charges_are_many_and_each_has_its_article(cases: dict[str, list[Example]]) -> None:
    labels = load_task("judgment").ask.labels(cases["train"])
    assert len(labels.counts["charges"]) >= 12
    assert len(labels.counts["penalty"]) >= 5
    article = {crime["charge"]: crime["article"] for crime in GRAMMAR["crimes"]}
    for case in cases["train"]:
        assert case.answer is not None
        for judgment in case.answer["judgments"]:
            assert judgment["articles"] == [article[charge] for charge in judgment["charges"]]
    assert set(load_task("judgment").ask.labels(cases["test"]).counts["charges"]) <= set(article)


def test_nobodys_own_cases_are_written_over(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("own", "utf-8")
    with pytest.raises(UserError, match=r"test.jsonl: exists already; choose another folder$"):
        write_demo(tmp_path, {"train": 4, "test": 2})
    assert (tmp_path / "test.jsonl").read_text("utf-8") == "own"
    assert not (tmp_path / "train.jsonl").exists()
