"""The life of a run: moved, copied, trained anew, its parts deleted; a score is right or refused.

Two trainings answered two test files whose cases have the same ids and the same names.
"""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from panjue.eval.report import write_page
from panjue.eval.score import score
from panjue.prompts.cli_scores import submission_of
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, sha256
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.answers import open_answers
from tests.opened import decoded
from tests.records import believing, write_training
from tests.records import write_answers as write_record

CHARGES = {"盗窃罪": "264", "诈骗罪": "266", "抢劫罪": "263"}
LABELS = collect(
    {"charges": [c], "articles": [a], "penalty": [PENALTIES[13]]} for c, a in CHARGES.items()
)
GOLD = {"one": "盗窃罪", "two": "诈骗罪"}  # test file -> the charge of all its cases
BELIEVED = {"a": "诈骗罪", "b": "抢劫罪"}  # training -> what its classifier believes of any case
PEOPLE = ["甲", "乙"]
CASES = 3


def case(name: str, key: int) -> dict[str, Any]:
    penalty = {"surveillance": 0, "detention": 0, "imprisonment": 6}
    penalty |= {"death_penalty": False, "life_imprisonment": False}
    judged = {"charges": [GOLD[name]], "articles": [CHARGES[GOLD[name]]], "penalty": penalty}
    outcomes = [{"name": person, **judged} for person in PEOPLE]
    fact = f"甲、乙在{name}号案件中第{key}次作案。"
    return {"id": key, "fact": fact, "defendants": PEOPLE, "outcomes": outcomes}


def reply(training: str, name: str, key: int) -> str:
    """Return the reply of a training: `a` is right in its first case, `b` in the first two."""
    is_right = key <= list(BELIEVED).index(training)
    charge = GOLD[name] if is_right else "抢劫罪"
    judged = {"charges": [charge], "articles": [CHARGES[charge]], "penalty": PENALTIES[13]}
    return dump({"judgments": [{"name": person, **judged} for person in PEOPLE]})


def right_score(training: str, name: str) -> float:
    """Return `final`: the penalty is right everywhere, charge and article in some cases."""
    right = list(BELIEVED).index(training) + 1
    return 0.6 * right / CASES + 0.4


def believed_score(training: str, name: str) -> float:
    """Return `final` of the classifier: penalties are right, articles are those of 抢劫罪."""
    return 0.3 * (BELIEVED[training] == GOLD[name]) + 0.4


def write_adapter(folder: Path, training: str) -> None:
    logits = {
        "charges": {name: 4.0 if name == BELIEVED[training] else -4.0 for name in CHARGES},
        "articles": dict.fromkeys(CHARGES.values(), 0.0),
        "penalty": {PENALTIES[13]: 0.0},
    }
    write_training(folder, believing(load_task("judgment"), logits), examples=1)
    LABELS.save(folder)


def write_answers(run: Path, training: str, test: Path) -> None:
    folder = run / "answers" / test.stem
    folder.mkdir(parents=True)
    LABELS.save(folder)
    write_record(
        folder,
        test,
        trained=str(run / "adapter"),
        trained_sha256=model_sha256(run / "adapter"),
        labels_sha256=sha256(folder / "labels.json"),
    )
    rest = {"finish": ["stop"], "dropped_sentences": 0}
    rows = [{"id": i, "texts": [reply(training, test.stem, i)], **rest} for i in range(CASES)]
    write_lines(folder / "completions.jsonl", rows)
    decoded(folder, "model")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")


PARTS = (
    "adapter",
    "adapter/classifier.npz",
    "answers/one/labels.json",
    "answers/one/completions.jsonl",
    "answers/one/cases.jsonl",
    "answers/one/submission.jsonl",
)


class Life(RuleBasedStateMachine):
    """Runs at places; each knows which training it is of."""

    @initialize()
    def begin(self) -> None:
        self.top = Path(tempfile.mkdtemp())
        self.tests: dict[str, Path] = {}  # of which cases -> the file that has them now
        for name in GOLD:
            self.tests[name] = self.top / f"{name}.jsonl"
            write_lines(self.tests[name], [case(name, key) for key in range(CASES)])
        self.runs: dict[str, str] = {}  # folder -> training
        for training in BELIEVED:
            self.train(training, training)

    def train(self, place: str, training: str) -> None:
        write_adapter(self.top / place / "adapter", training)
        for name in GOLD:
            write_answers(self.top / place, training, self.top / f"{name}.jsonl")
        self.runs[place] = training

    def teardown(self) -> None:
        if hasattr(self, "top"):
            shutil.rmtree(self.top)

    places = st.sampled_from([*BELIEVED, "c", "d"])
    names = st.sampled_from(list(GOLD))

    @rule(old=places, new=places)
    def move(self, old: str, new: str) -> None:
        if old in self.runs and new not in self.runs:
            (self.top / old).rename(self.top / new)
            self.runs[new] = self.runs.pop(old)

    @rule(old=places, new=places)
    def copy(self, old: str, new: str) -> None:
        if old in self.runs and new not in self.runs:
            shutil.copytree(self.top / old, self.top / new)
            self.runs[new] = self.runs[old]

    @rule(place=places, training=st.sampled_from(list(BELIEVED)))
    @precondition(lambda self: all(self.tests[n].stem == n for n in GOLD))
    def train_anew(self, place: str, training: str) -> None:
        """Train where a run was that is gone."""
        if place not in self.runs:
            self.train(place, training)

    @rule(place=places, training=st.sampled_from(list(BELIEVED)))
    def replace_adapter(self, place: str, training: str) -> None:
        """Put another training's adapter beside answers that it never gave."""
        if place in self.runs:
            shutil.rmtree(self.top / place / "adapter", ignore_errors=True)
            write_adapter(self.top / place / "adapter", training)

    @rule(place=places, part=st.sampled_from(PARTS))
    def delete(self, place: str, part: str) -> None:
        path = self.top / place / part
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @rule()
    def swap_names(self) -> None:
        """Give each test file the other one's name."""
        one, two = self.tests.values()
        spare = one.rename(self.top / "spare")
        two.rename(one)
        spare.rename(two)
        self.tests = dict(zip(GOLD, (two, one), strict=True))

    @rule(place=places, name=names)
    def decode(self, place: str, name: str) -> None:
        with suppress(UserError):
            decoded(self.top / place / "answers" / name)

    @rule(place=places, name=names)
    def report(self, place: str, name: str) -> None:
        with suppress(UserError):
            write_page(open_answers(self.top / place / "answers" / name, self.tests[name]))

    @rule(place=places, name=names, is_named=st.booleans())
    def score(self, place: str, name: str, is_named: bool) -> None:
        if place not in self.runs:
            return
        folder = self.top / place
        meant = folder / "answers" / name if is_named else folder
        gold = self.tests[name]
        try:
            submission, reader, answered = submission_of(meant, gold, None)
            found = score(reader, gold, submission, answered)
        except UserError:
            return
        training = self.runs[place]
        assert found.total.mean["final"] == pytest.approx(right_score(training, name))
        believed = found.baselines.get("text classifier")
        if believed:
            assert believed["final"] == pytest.approx(believed_score(training, name))


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    phases=[Phase.explicit, Phase.generate],  # to shrink a failure takes minutes
)
