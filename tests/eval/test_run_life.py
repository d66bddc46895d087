"""The life of a run: moved, copied, trained anew, its parts deleted; a score is right or refused.

Two trainings answered two test files whose cases have the same ids and the same names.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from panjue.eval.answers import open_answers
from panjue.eval.decoding import decode_answers
from panjue.eval.report import write_page
from panjue.eval.score import score
from panjue.prompts.cli_scores import submission_of
from panjue.prompts.labels import collect
from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, sha256
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from tests.eval.records import believing, write_training
from tests.eval.records import write_answers as write_record

CHARGES = {"盗窃罪": "264", "诈骗罪": "266", "抢劫罪": "263"}
LABELS = collect(
    {"charges": [c], "articles": [a], "penalty": [PENALTIES[13]]} for c, a in CHARGES.items()
)
GOLD = {"one": "盗窃罪", "two": "诈骗罪"}  # test file -> the charge of all its cases
BELIEVED = {"a": "诈骗罪", "b": "抢劫罪"}  # training -> what its classifier believes of any case
CASES = 3


def case(name: str, key: int) -> dict[str, Any]:
    charge = GOLD[name]
    penalty = {"surveillance": 0, "detention": 0, "imprisonment": 6}
    penalty |= {"death_penalty": False, "life_imprisonment": False}
    judged = {"charges": [charge], "articles": [CHARGES[charge]], "penalty": penalty}
    outcomes = [{"name": person, **judged} for person in ("甲", "乙")]
    fact = f"甲、乙在{name}号案件中第{key}次作案。"
    return {"id": key, "fact": fact, "defendants": ["甲", "乙"], "outcomes": outcomes}


def reply(training: str, name: str, key: int) -> str:
    """Return the reply of a training: `a` is right in its first case, `b` in the first two."""
    is_right = key <= list(BELIEVED).index(training)
    charge = GOLD[name] if is_right else "抢劫罪"
    judged = {"charges": [charge], "articles": [CHARGES[charge]], "penalty": PENALTIES[13]}
    return dump({"judgments": [{"name": person, **judged} for person in ("甲", "乙")]})


def right_score(training: str, name: str) -> float:
    """Return `final`: the penalty is right everywhere, charge and article in some cases."""
    right = list(BELIEVED).index(training) + 1
    return 0.6 * right / CASES + 0.4


def believed_score(training: str, name: str) -> float:
    """Return `final` of the classifier: penalties are right, articles are those of 抢劫罪."""
    return round(0.3 * (BELIEVED[training] == GOLD[name]) + 0.4, 4)


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
    rest = {"finish": ["stop"], "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
    rest["dropped_sentences"] = 0
    rows = [{"id": i, "texts": [reply(training, test.stem, i)], **rest} for i in range(CASES)]
    (folder / "completions.jsonl").write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    decode_answers(folder)


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
            rows = [case(name, key) for key in range(CASES)]
            self.tests[name].write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
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
        one, two = (self.top / f"{name}.jsonl" for name in GOLD)
        spare = self.top / "spare"
        one.rename(spare)
        two.rename(one)
        spare.rename(two)
        self.tests = {name: two if path == one else one for name, path in self.tests.items()}

    @rule(place=places, name=names)
    def decode(self, place: str, name: str) -> None:
        folder = self.top / place / "answers" / name
        try:
            decode_answers(folder)
        except UserError:
            return

    @rule(place=places, name=names)
    def report(self, place: str, name: str) -> None:
        try:
            write_page(self.top / place / "answers" / name, self.tests[name])
        except UserError:
            return

    @rule(place=places, name=names, is_named=st.booleans())
    def score(self, place: str, name: str, is_named: bool) -> None:
        if place not in self.runs:
            return
        folder = self.top / place
        meant = folder / "answers" / name if is_named else folder
        found = score_of(meant, self.tests[name])
        if found:
            training = self.runs[place]
            final, believed = found
            assert final == pytest.approx(right_score(training, name))
            assert believed in (None, believed_score(training, name))


def score_of(meant: Path, gold: Path) -> tuple[float, float | None] | None:
    """Return `final` of the answers and of the classifier alone; None if it is refused."""
    try:
        submission, reader = submission_of(meant, gold, None)
        result = score(reader, gold, submission)
    except UserError:
        return None
    believed = result.baselines.get("text classifier")
    return result.total.mean["final"], round(believed["final"], 4) if believed else None


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    phases=[Phase.explicit, Phase.generate],  # to shrink a failure takes minutes
)


def test_answers_to_the_named_file_are_meant(tmp_path: Path) -> None:
    """Its own name may begin like that of the automatic answers."""
    gold = tmp_path / "held-out-v2.jsonl"
    gold.write_text("".join(dump(case("one", key)) + "\n" for key in range(CASES)), "utf-8")
    other = tmp_path / "two.jsonl"
    other.write_text("".join(dump(case("two", key)) + "\n" for key in range(CASES)), "utf-8")
    write_adapter(tmp_path / "run/adapter", "a")
    twin = tmp_path / "one.jsonl"
    shutil.copy(gold, twin)
    write_answers(tmp_path / "run", "a", twin)
    (tmp_path / "run/answers/one").rename(tmp_path / "run/answers/held-out-v2")
    write_answers(tmp_path / "run", "a", other)
    submission, _ = submission_of(tmp_path / "run", gold, None)
    assert submission.name == "held-out-v2"
    assert open_answers(tmp_path / "run", other).folder.name == "two"
