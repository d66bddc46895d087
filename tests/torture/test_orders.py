"""Whatever the order of commands: score, who answered and which adapter are true, or are refused.

A stand-in for the engine answers: each adapter is right in so many cases, and its replies have so
many tokens, by which the oracle knows who made a row. It compares that with the record, fields with
the replies, and kept scores with one that it computes itself.
"""

import asyncio
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from panjue.finetune.trained import find_trained
from panjue.prompts.cli_choose import adapters_of, choose_adapter
from panjue.prompts.cli_generate import decode_again, generate
from panjue.prompts.cli_scores import score
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import collect
from panjue.prompts.model import prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    dump,
    exclusive_lock,
    read_lines,
    read_object,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.records import AnswersRecord, StoredScores
from panjue.prompts.plumbing.run import ADAPTER_WEIGHTS
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.ask import QuestionMaker, Request
from panjue.serve.decoding import edited
from panjue.serve.job import Job
from panjue.serve.merge import Served
from panjue.serve.settings import AnswerSetting, choose_settings, generate_settings
from tests.records import believing, write_training

TASK = load_task("judgment")
CASES = 20
CHARGES = {"盗窃罪": "264", "诈骗罪": "266"}
RIGHT, WRONG = CHARGES
LABELS = collect(
    {"charges": [c], "articles": [a], "penalty": [PENALTIES[13]]} for c, a in CHARGES.items()
)
STEPS = {"adapter": 2, "kept/step-1": 1}
PLACES = ("a", "b", "c")
NAMES = ("one", "two")
ORDERS = 300


def judged(charge: str) -> dict[str, Any]:
    return {"charges": [charge], "articles": [CHARGES[charge]], "penalty": 13}


def case(file: str, key: int) -> dict[str, Any]:
    """Return a case of two persons, all of whom are guilty of the first charge."""
    penalty = {"surveillance": 0, "detention": 0, "imprisonment": 6}
    penalty |= {"death_penalty": False, "life_imprisonment": False}
    one = {"charges": [RIGHT], "articles": [CHARGES[RIGHT]], "penalty": penalty}
    outcomes = [{"name": name, **one} for name in ("甲", "乙")]
    fact = f"甲、乙在{file}的第{key}号案件中作案。"
    return {"id": key, "fact": fact, "defendants": ["甲", "乙"], "outcomes": outcomes}


def level_of(training: int, place: str) -> int:
    """Return in how many cases the adapter of a training is right: each in another number."""
    return (3 + 4 * training + 7 * (STEPS[place] == 1)) % (CASES + 1)


class World:
    """Runs at places, two test files, and what the stand-in was asked."""

    def __init__(self, top: Path, seed: int) -> None:
        self.top = top
        self.draw = random.Random(seed)
        self.trainings = 0
        self.adapters: dict[int, str] = {}
        """Tokens of a reply -> the fingerprint of the adapter that made it."""
        self.believed: dict[str, str] = {}
        """Fingerprint of an adapter -> the charge that the text classifier beside it answers."""
        for name in (*NAMES, "dev"):
            rows = [case(name, key) for key in range(CASES)]
            (top / f"{name}.jsonl").write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
        self.train(top / "a")

    def train(self, run: Path) -> None:
        """Train a run anew, as `panjue sft` leaves it: other weights, nothing kept or chosen."""
        self.trainings += 1
        for name in ("adapter", "kept", "chosen.json"):
            if (run / name).is_dir():
                shutil.rmtree(run / name)
            else:
                (run / name).unlink(missing_ok=True)
        dev = self.top / "dev.jsonl"
        of_data = {"dev": str(dev), "dev_sha256": sha256(dev), "split_by": "normal text"}
        of_prompt = {"prompt_sha256": prompt_sha256("judgment")}
        believed = self.draw.choice([RIGHT, WRONG])
        logits = {
            "charges": {name: 4.0 if name == believed else -4.0 for name in CHARGES},
            "articles": {of: 4.0 if name == believed else -4.0 for name, of in CHARGES.items()},
            "penalty": {PENALTIES[13]: 0.0},
        }
        log = []
        for place, step in STEPS.items():
            folder = run / place
            folder.mkdir(parents=True)
            LABELS.save(folder)
            hashes = {"labels_sha256": sha256(folder / "labels.json")}
            record = {**of_data, **of_prompt, **hashes, "base_files": {"config.json": "0"}}
            write_training(folder, believing(TASK, logits), examples=1, **record)
            write_json(folder / "adapter_config.json", {"r": 8})
            tokens = 10 * self.trainings + step
            weights = {"tokens": tokens, "level": level_of(self.trainings, place)}
            (folder / ADAPTER_WEIGHTS).write_text(dump(weights))
            self.adapters[tokens] = model_sha256(folder)
            self.believed[self.adapters[tokens]] = believed
            log.append({"step": step, "eval_loss": 1 / step})
        write_json(run / "manifest.json", read_object(run / "adapter/manifest.json"))
        write_json(run / "training.json", {"kept_step": 2})
        (run / "log.jsonl").write_text("".join(dump(row) + "\n" for row in log), "utf-8")

    # The commands; each may be refused.

    def generate(self) -> None:
        run, name = self.run(), self.name()
        words = self.draw.choice([[], ["answer=auto"], ["answer=model"], ["answer=classifier"]])
        trained = find_trained(run)
        settings = generate_settings(run, trained, words)
        generate(run, trained, self.top / f"{name}.jsonl", settings)

    def decode(self) -> None:
        answers: list[AnswerSetting | None] = [None, "auto", "model", "classifier"]
        answer = self.draw.choice(answers)
        decode_again(self.run() / "answers" / self.name(), answer)

    def choose(self) -> None:
        run = self.run()
        with exclusive_lock(run):
            adapters = adapters_of(run)
            choose_adapter(run, adapters, choose_settings(adapters[0].trained))

    def score(self) -> None:
        gold = self.top / f"{self.name()}.jsonl"
        if self.draw.random() < 0.3:  # gold of some of the cases
            some = self.top / "some.jsonl"
            some.write_text("".join(gold.read_text("utf-8").splitlines(keepends=True)[:3]), "utf-8")
            gold = some
        score(gold, self.run() / "answers" / self.name(), None, None, None)

    def retrain(self) -> None:
        self.train(self.run())

    def copy(self) -> None:
        old, new = self.run(), self.top / self.draw.choice(PLACES)
        if not new.exists():
            shutil.copytree(old, new)

    def move(self) -> None:
        old, new = self.run(), self.top / self.draw.choice(PLACES)
        if not new.exists():
            old.rename(new)

    def delete(self) -> None:
        parts = ["adapter/choice.json", "kept/step-1", "answers/held-out", "chosen.json"]
        parts += [f"answers/{self.name()}/{part}" for part in ("decode.json", "cases.jsonl")]
        path = self.run() / self.draw.choice(parts)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def edit(self) -> None:
        path = self.run() / "answers" / self.name() / "submission.jsonl"
        if path.exists():
            text = path.read_text("utf-8")
            path.write_text(text.replace('"penalty":13', '"penalty":12', 1), "utf-8")

    def run(self) -> Path:
        return self.draw.choice([self.top / name for name in PLACES if (self.top / name).exists()])

    def name(self) -> str:
        return self.draw.choice(NAMES)

    # The oracle.

    def check(self) -> None:
        for manifest in self.top.glob("*/answers/*/manifest.json"):
            folder = manifest.parent
            record = AnswersRecord.read(folder)
            self.check_adapter(folder, record)
            submission = folder / "submission.jsonl"
            if submission.exists() and (folder / "decode.json").exists():
                self.check_submission(folder, submission)

    def check_adapter(self, folder: Path, record: AnswersRecord) -> None:
        """The replies of a folder are of the adapter that its record names."""
        rows = folder / "completions.jsonl"
        for _, row in read_lines(rows) if rows.exists() else ():
            assert self.adapters[row["completion_tokens"]] == record.trained_sha256, folder

    def check_line(self, decoding: dict[str, Any]) -> None:
        """The line that a person reads says of each field who answered."""
        line = decoding["answered_by"]
        whole = re.match(r"answered by the (model|text classifier)", line)
        for name, who in decoding["by_field"].items():
            told = {"model": "model", "text classifier": "classifier"}[whole[1]] if whole else ""
            assert told == who or f"{name}: {who}" in line, line

    def check_submission(self, folder: Path, submission: Path) -> None:
        """Each field is answered by whom decode.json says; the kept score is that of the file."""
        decoding = read_object(folder / "decode.json")
        scores = StoredScores.read(folder, submission.name)
        rows = [row for _, row in read_lines(submission)]
        if edited(submission):
            assert scores is None
            return
        replies = {}
        if (folder / "completions.jsonl").exists():
            for _, row in read_lines(folder / "completions.jsonl"):
                replies[row["id"]] = json.loads(row["texts"][0])["judgments"][0]
        believed = self.believed[AnswersRecord.read(folder).trained_sha256 or ""]
        self.check_line(decoding)
        of_model = [name for name, who in decoding["by_field"].items() if who == "model"]
        for row in rows:
            for one in row["judgments"]:
                reply = {**replies.get(row["id"], {}), "penalty": 13}
                for name in decoding["by_field"]:
                    right = reply if name in of_model else judged(believed)
                    assert one[name] == right[name], (folder, name)
        if scores:
            assert scores.examples == CASES
            assert scores.mean("final") == pytest.approx(final_of(rows)), folder


def final_of(rows: list[dict[str, Any]]) -> float:
    """Return the official score: all cases have two persons, and so one weight."""
    total = 0.0
    for row in rows:
        for one in row["judgments"]:
            sets = (one["charges"] == [RIGHT]) + (one["articles"] == [CHARGES[RIGHT]])
            total += 0.3 * sets + 0.4 * (one["penalty"] == 13)
    return total / (2 * CASES)


class StandIn:
    """Answers as an adapter does that is right in its first cases; the weights say in how many."""

    longest = 0
    sequences = 1

    def __init__(self, adapter: Path) -> None:
        self.runner = asyncio.Runner()
        self.weights = json.loads((adapter / ADAPTER_WEIGHTS).read_text())

    async def ask(self, request: Request) -> Any:
        asked = dump(request.question.messages)
        [key] = re.findall(r"的第(\d+)号案件", asked)
        charge = RIGHT if int(key) < self.weights["level"] else WRONG
        one = {"charges": [charge], "articles": [CHARGES[charge]], "penalty": PENALTIES[13]}
        text = dump({"judgments": [{"name": name, **one} for name in ("甲", "乙")]})
        tokens = range(self.weights["tokens"])
        reply = SimpleNamespace(text=text, finish_reason="stop", token_ids=tokens, logprobs=None)
        return SimpleNamespace(outputs=[reply], num_cached_tokens=0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stand-in answer for every adapter, as it lies there when it is asked."""

    @contextmanager
    def running(served: Served, *_: object) -> Iterator[StandIn]:
        standing = StandIn(served.model)
        with standing.runner:
            yield standing

    def asking(job: Job) -> QuestionMaker:
        return QuestionMaker(job.task, job.trained, None, job.budget)

    monkeypatch.setattr("panjue.serve.engine.engine", running)
    monkeypatch.setattr("panjue.serve.merge.served_model", lambda of, *_: Served(of.folder))
    monkeypatch.setattr(Job, "question_maker", asking)
    monkeypatch.setattr(Job, "check_engine", lambda _: None)


COMMANDS: tuple[Callable[[World], None], ...] = (
    *(World.generate, World.decode, World.choose, World.score, World.score),
    *(World.retrain, World.copy, World.move, World.delete, World.edit),
)


@pytest.mark.usefixtures("stand_in")
def test_what_is_recorded_is_true_or_refused(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = ORDERS if pytestconfig.getoption("--torture") else 20
    refused = 0
    for seed in range(orders):
        top = tmp_path / str(seed)
        top.mkdir()
        world = World(top, seed)
        done = []
        for command in world.draw.choices(COMMANDS, k=8):
            done.append(command.__name__)
            try:
                command(world)
            except UserError as error:
                done.append(f"({error})")
                refused += 1
            try:
                world.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {done}") from error
        shutil.rmtree(top)
    assert refused < 8 * orders / 2, "most commands do something"


class RealWorld(World):
    """The same commands on a real training, which the real engine answers for; no retraining."""

    def __init__(self, top: Path, seed: int, trained: Path, cases: Path) -> None:
        self.top = top
        self.draw = random.Random(seed)
        shutil.copytree(trained, top / "a")
        lines = cases.read_text("utf-8").splitlines(keepends=True)
        for name, part in zip(NAMES, (lines[:CASES], lines[-CASES:]), strict=True):
            (top / f"{name}.jsonl").write_text("".join(part), "utf-8")

    def check_adapter(self, folder: Path, record: AnswersRecord) -> None:
        assert record.trained_sha256 == model_sha256(folder.parents[1] / "adapter")

    def check_submission(self, folder: Path, submission: Path) -> None:
        scores = StoredScores.read(folder, submission.name)
        if edited(submission):
            assert scores is None
        if scores is None:
            return
        alone = self.top / "alone.jsonl"
        shutil.copy(submission, alone)
        score(self.top / f"{folder.name}.jsonl", alone, "judgment", self.top / "alone.json", None)
        assert scores.mean("final") == pytest.approx(read_object(self.top / "alone.json")["final"])


@pytest.mark.endurance
@pytest.mark.usefixtures("running_engine")
@pytest.mark.parametrize("seed", range(5))
def test_what_is_recorded_is_true_or_refused_with_the_real_engine(
    seed: int, tmp_path: Path, trained: Path, workshop: Path
) -> None:
    world = RealWorld(tmp_path, seed, trained, workshop / "demo/test.jsonl")
    commands = [one for one in COMMANDS if one not in (World.retrain, World.choose)]
    world.generate()  # so that there is something to score, to move and to edit
    for command in world.draw.choices([World.generate, World.score, *commands], k=12):
        with suppress(UserError):
            command(world)
        world.check()
