"""The official scorers agree: written anew from their definitions, and where they are present.

`PANJUE_OFFICIAL` names a folder with clones of the organisers' repositories.
"""

import csv
import io
import json
import math
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, f1_score

from panjue.eval.metric_values import MetricValues, metric_values, summarize
from panjue.eval.score import score
from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import penalty_class, sentence
from panjue.prompts.tasks.reading.task import leave_one_out
from tests.eval import emocaustics

Row = dict[str, Any]
Case = tuple[Example, Row, Row]
"""Example, gold row, row of the submission."""

CLASSES = {"severity": (6, False), "scotus": (14, False), "fscs": (2, False), "ecthr": (10, True)}
"""Task of FairLex -> the number of its classes, and whether an answer is a set of them."""


def official(repository: str) -> Path:
    """Return the organisers' repository of this name; skip where it is absent."""
    folder = Path(os.environ.get("PANJUE_OFFICIAL", "/nowhere"), repository)
    if not folder.is_dir():
        pytest.skip(f"no {folder}: PANJUE_OFFICIAL names no folder with it")
    return folder


def judgments(draw: random.Random) -> list[Case]:
    def labels() -> list[str]:
        return draw.sample("abcde", draw.choice([0, 1, 1, 2, 3]))

    def judgment(name: str) -> Row:
        penalty = draw.choice([0, 1, 13, 14])
        return {"name": name, "charges": labels(), "articles": labels(), "penalty": penalty}

    cases = []
    for number in range(draw.randint(1, 4)):
        names = [f"甲{i}" for i in range(draw.choice([1, 1, 2, 3, 7]))]
        gold, told = ({"judgments": [judgment(name) for name in names]} for _ in range(2))
        cases.append((Example(number, "事", names=tuple(names)), gold, told))
    return cases


def judgment_scores(cases: Sequence[Case]) -> dict[str, float]:
    """CMDL: means over defendants, cases weighted by log2 of their number."""
    means, weights = [], []
    for _, gold, told in cases:
        rows = []
        for right, given in zip(gold["judgments"], told["judgments"], strict=True):
            values = []
            for field in ("charges", "articles"):
                hits = len({*right[field]} & {*given[field]})
                precision = hits / max(1, len(given[field]))
                recall = hits / max(1, len(right[field]))
                f1 = 2 * precision * recall / max(precision + recall, 1e-9)
                values += [precision, recall, f1]
            same = float(right["penalty"] == given["penalty"])
            rows.append([*values, same, 0.3 * values[2] + 0.3 * values[5] + 0.4 * same])
        means.append(np.mean(rows, axis=0))
        weights.append(math.log2(len(rows)))
    total = np.average(means, axis=0, weights=weights if any(weights) else None)
    return dict(zip(load_task("judgment").score.names, total.tolist(), strict=True))


def answers(draw: random.Random) -> list[Case]:
    def text() -> str:
        return "".join(draw.choices("甲乙丙Ab1 ，。《", k=draw.randint(0, 6)))

    cases = []
    for number in range(draw.randint(1, 4)):
        references = tuple(text() for _ in range(draw.randint(1, 4)))
        example = Example(number, "事", references=leave_one_out(references))
        told = {"id": number, "answer": draw.choice([text(), *references])}
        cases.append((example, {"references": example.references, "all": references}, told))
    return cases


def token_f1(gold: Sequence[str], told: Sequence[str]) -> float:
    same = (Counter(gold) & Counter(told)).total()
    if not gold or not told:
        return float(gold == told)
    if not same:
        return 0.0
    precision, recall = same / len(told), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def reading_scores(cases: Sequence[Case]) -> dict[str, float]:
    """CJRC: each reference is left out once; the best of the others, characters as a multiset."""

    def characters(text: str) -> list[str]:
        return list(re.sub("[ ，。《]", "", text.lower()))

    sums = {"f1": 0.0, "em": 0.0}
    for _, gold, told in cases:
        golds, answer = [characters(text) for text in gold["all"]], characters(told["answer"])
        left = [golds[:i] + golds[i + 1 :] for i in range(len(golds))] if golds[1:] else [golds]
        sums["f1"] += fmean([max(token_f1(g, answer) for g in of) for of in left])
        sums["em"] += fmean([any(g == answer for g in of) for of in left])
    return {name: value / len(cases) for name, value in sums.items()}


def places(draw: random.Random) -> list[Case]:
    def text() -> str:
        words = draw.choices(["The", "sea", "a", "red", "SEA,", "-", "11"], k=draw.randint(1, 4))
        return " ".join(words)

    cases = []
    for number in range(draw.randint(1, 4)):
        gold = tuple(text() for _ in range(draw.randint(1, 3)))
        told = {"id": number, "ret": [text() for _ in range(draw.randint(1, 5))]}
        cases.append((Example(number, "x", references=(gold,)), {"references": (gold,)}, told))
    return cases


def cloze_scores(cases: Sequence[Case]) -> dict[str, float]:
    """KCT: the best pair by F1 of words without punctuation and articles."""

    def words(text: str) -> list[str]:
        return [w for w in re.sub(r"[^\w\s]", "", text.lower()).split() if w not in {"a", "the"}]

    best = [
        max(token_f1(words(g), words(t)) for g in gold["references"][0] for t in told["ret"])
        for _, gold, told in cases
    ]
    return {"f1": float(np.mean(best))}


def classes(name: str) -> Callable[[random.Random], list[Case]]:
    size, several = CLASSES[name]
    words = load_task(name).score.order["class"]

    def drawn(draw: random.Random) -> list[Case]:
        def row(number: int) -> Row:
            if several:
                chosen = sorted(draw.sample(range(size), draw.choice([0, 0, 1, 2])))
                return {"id": number, "labels": chosen}
            label = draw.choice([0, 1, size - 1, draw.randrange(size)])
            return {"id": number, "label": words[label] if name == "scotus" else label}

        numbers = range(draw.randint(1, 8))
        return [(Example(n, "text"), row(n), row(n)) for n in numbers]

    return drawn


def fairlex_scores(name: str) -> Callable[[Sequence[Case]], dict[str, float]]:
    size, several = CLASSES[name]

    def column(rows: Iterable[Row]) -> NDArray[Any]:
        if not several:
            return np.array([row["label"] for row in rows])
        # FairLex adds a column for "no article is violated", in gold and in predictions.
        chosen = [row["labels"] or [size] for row in rows]
        return np.array([np.isin(range(size + 1), labels) for labels in chosen])

    def scores(cases: Sequence[Case]) -> dict[str, float]:
        gold = column(right for _, right, _ in cases)
        told = column(given for _, _, given in cases)
        # wilds, with one class per example: the classes that occur in gold.
        labels = None if several else np.unique(gold)
        f1 = f1_score(gold, told, labels=labels, average="macro", zero_division=0)
        return {"accuracy": float(accuracy_score(gold, told)), "macro_f1": float(f1)}

    return scores


SCORERS: dict[str, tuple[Callable[[random.Random], list[Case]], Any]] = {
    "judgment": (judgments, judgment_scores),
    "reading": (answers, reading_scores),
    "cloze": (places, cloze_scores),
    **{name: (classes(name), fairlex_scores(name)) for name in CLASSES},
}


@pytest.mark.parametrize("name", SCORERS)
def test_the_official_scorer_gives_the_same(name: str, request: pytest.FixtureRequest) -> None:
    task, (make, official) = load_task(name), SCORERS[name]
    largest = 0.0
    for seed in range(10_000 if request.config.getoption("--torture") else 200):
        cases = make(random.Random(seed))
        values = MetricValues(task)
        for example, gold, told in cases:
            values.add(example, metric_values(task, gold, told, "here"))
        found, expected = summarize(values, resamples=0).mean, official(cases)
        assert found.keys() == expected.keys()
        largest = max(largest, *(abs(found[key] - expected[key]) for key in found))
    assert largest <= 1e-9


def test_the_scripts_of_emocaustics_give_the_figures_of_their_cases(tmp_path: Path) -> None:
    scripts = official("EmoCaustics")
    gold, answers = tmp_path / "gold", tmp_path / "answers"
    for number, case in enumerate(emocaustics.CASES.values(), start=1):
        answer = emocaustics.Answer()
        case.damage(answer)
        answer.write(gold, answers, str(number))
    found = emocaustics.script_scores(scripts, gold, answers, tmp_path)
    for number, (name, case) in enumerate(emocaustics.CASES.items(), start=1):
        assert found[str(number)] == pytest.approx(case.official, abs=1e-4), name


def test_the_scripts_of_emocaustics_give_the_same_where_they_mean_the_same(tmp_path: Path) -> None:
    """As in a baseline's files or in ours; `CASES` has what they count otherwise."""
    scripts = official("EmoCaustics")
    gold, answers = tmp_path / "gold", tmp_path / "answers"
    for seed in range(200):
        emocaustics.random_answer(random.Random(seed)).write(gold, answers, str(seed))
    expected = emocaustics.script_scores(scripts, gold, answers, tmp_path)
    found = emocaustics.own_scores(gold, answers)
    assert found.keys() == expected.keys()
    largest = np.abs(np.array([*found.values()]) - [expected[key] for key in found]).max()
    print(f"the largest difference: {largest:.1e}")
    assert largest <= 1e-6


DAMAGED = 200
"""Submissions of each task that the organisers' code scores, too."""


def organisers_say(task: str, code: Path, jobs: Iterable[Row], folder: Path) -> list[Any]:
    """Return what their code makes of the jobs, one by one; it runs in `folder`."""
    python = official("venv") / "bin/python"
    done = subprocess.run(
        [python, "-W", "ignore", Path(__file__).with_name("organisers.py"), task],
        input="\n".join(map(dump, jobs)),
        env={**os.environ, "PYTHONPATH": str(code)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return list(map(json.loads, done.stdout.splitlines()))


def largest(differences: Iterable[float], what: str) -> float:
    """Return the largest difference, and print it for `pytest -rP`."""
    values = [abs(difference) for difference in differences]
    print(f"{what}: {len(values)} numbers compared, largest difference {max(values):.1e}")
    return max(values)


def write_lines(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    return path


CHARGES = ("盗窃罪", "诈骗罪", "抢劫罪", "赌博罪", "开设赌场罪")
ARTICLES = ("264", "266", "263", "303-1", "303-2", "287.2")
LISTED = {"charge2idx": CHARGES[:4], "article2idx_paragraphs": ARTICLES[:4]}
"""File of the stage -> the labels in it; the others are outside."""

SENTENCES: tuple[Row, ...] = (
    {"death_penalty": True},
    {"life_imprisonment": 1},
    *({"detention": months} for months in (1, 6)),
    *({"surveillance": months} for months in (6, 12, 13, 24)),
    *({"imprisonment": months} for months in (0, 6, 7, 9, 10, 12, 13, 24, 36, 60, 84, 120, 121)),
)


def damaged_judgments(draw: random.Random) -> tuple[list[Row], list[Row], list[Any]]:
    """Return cases, a submission, and its judgments as the contest's code takes them.

    Names may be equal, labels are dropped and added, in the lists or not; defendants and whole
    cases are missing, and others are there.
    """

    def labels(known: Sequence[str]) -> list[str]:
        return draw.sample(known, draw.choice([0, 1, 1, 2, 3]))

    cases: list[Row] = []
    rows: list[Row] = []
    judgments: list[Any] = []
    for number in range(draw.randint(2, 6)):
        names = draw.choices("甲乙丙丁戊", k=draw.choice([1, 2, 2, 3, 5]) if number else 3)
        outcomes: list[Row] = []
        for name in names:
            fields = {"charges": labels(CHARGES), "articles": labels(ARTICLES)}
            penalty = sentence(**draw.choice(SENTENCES))
            outcomes.append({"name": name, **fields, "penalty": penalty})
        case = {"id": number, "fact": "事", "defendants": names, "outcomes": outcomes}
        cases.append({key: case[key] for key in case if key != "defendants" or draw.random() < 0.5})
        told: list[Any] = []
        for outcome in outcomes:
            one = {**outcome, "penalty": draw.randrange(15)}
            if draw.random() < 0.5:
                one["penalty"] = penalty_class(outcome["penalty"])
            for field, known in (("charges", CHARGES), ("articles", ARTICLES)):
                if draw.random() < 0.5:
                    one[field] = labels(known)
            told.append(one)
        if draw.random() < 0.2:
            told[-1] = None  # at the end: among equal names the others stay in their places
        is_there = draw.random() < 0.9
        given = [one for one in told if one]
        if is_there:
            others = [{"name": "己", "charges": [], "articles": [], "penalty": 0}]
            extra = others if draw.random() < 0.2 else []
            rows.append({"id": number, "judgments": [*given, *extra]})
        judgments += told if is_there else [None] * len(told)
    draw.shuffle(rows)
    return cases, rows, judgments


JUDGMENT_NAMES = {
    "charge_precision": "case_level_Acc_Precision",
    "charge_recall": "case_level_Acc_Recall",
    "charge_f1": "case_level_Acc_F1",
    "article_precision": "case_level_Art_Precision",
    "article_recall": "case_level_Art_Recall",
    "article_f1": "case_level_Art_F1",
    "penalty_accuracy": "case_level_Pen_Acc",
    "final": "final",
}


def test_drdz_scores_damaged_submissions_alike(tmp_path: Path) -> None:
    code = official("CAIL2024") / "drdz/baseline"
    lists = []
    for name, known in LISTED.items():
        lists.append(tmp_path / f"data/{name}.json")
        write_json(lists[-1], {label: place for place, label in enumerate(known)})
    jobs, ours = [], []
    for seed in range(DAMAGED):
        cases, rows, judgments = damaged_judgments(random.Random(seed))
        gold = write_lines(tmp_path / f"gold-{seed}.jsonl", cases)
        submission = write_lines(tmp_path / "submission.jsonl", rows)
        ours.append(score(Reader(load_task("judgment")), gold, submission, labels=lists).total.mean)
        jobs.append({"gold": str(gold), "judgments": judgments})
    theirs = organisers_say("judgment", code, jobs, tmp_path)
    differences = []
    for found, expected in zip(ours, theirs, strict=True):
        differences += [found[name] - expected[their] for name, their in JUDGMENT_NAMES.items()]
    assert largest(differences, "DRDZ") < 1e-6  # they compute with 32 bits


def damaged_answers(draw: random.Random) -> tuple[Row, list[Row]]:
    """Return a gold file and a submission: rows missing, doubled, of other ids, other answers."""

    def text() -> str:
        words = "".join(draw.choices("甲乙丙Ab1 ，。《", k=draw.randint(0, 6)))
        return draw.choice([words, words, "YES", " NO ", ""])

    documents, rows = [], []
    for number in range(draw.randint(2, 5)):
        questions = []
        for place in range(draw.randint(1, 3)):
            key: Any = f"{number}{place}" if draw.random() < 0.9 else 10 * number + place
            references = [text() for _ in range(draw.randint(0, 4))]
            answers = [{"text": reference, "answer_start": -1} for reference in references]
            questions.append({"id": key, "question": "谁？", "answers": answers})
            questions[-1]["is_impossible"] = "false" if any(map(str.strip, references)) else "true"
            for _ in range(draw.choice([0, 1, 1, 1, 1, 2])):
                own = key if draw.random() < 0.9 else draw.choice([str(key), int(key), "x"])
                rows.append({"id": own, "answer": draw.choice([text(), *references])})
        domain = ("civil", "criminal")[number % 2]
        context = {"context": "甲乙丙。", "casename": "纠纷", "qas": questions}
        documents.append({"domain": domain, "paragraphs": [context]})
    draw.shuffle(rows)
    return {"data": documents}, rows


def test_cjrc_scores_damaged_submissions_alike(tmp_path: Path) -> None:
    code = official("CAIL2019") / "阅读理解/evaluate"
    jobs, ours = [], []
    for seed in range(DAMAGED):
        gold, rows = damaged_answers(random.Random(seed))
        path, submission = tmp_path / f"gold-{seed}.json", tmp_path / f"told-{seed}.json"
        write_json(path, gold)
        write_json(submission, rows)
        jobs.append({"gold": str(path), "submission": str(submission)})
        ours.append(score(Reader(load_task("reading")), path, submission))
    theirs = organisers_say("reading", code, jobs, tmp_path)
    differences, rounded = [], []
    for found, expected in zip(ours, theirs, strict=True):
        for metric in ("em", "f1"):
            differences.append(found.total.mean[metric] - expected["means"][metric])
            means = {name: 100 * one.mean[metric] for name, one in found.groups["domain"].items()}
            rounded += [mean - expected[domain][metric] for domain, mean in means.items()]
            mean_of_both = (expected["civil"][metric] + expected["criminal"][metric]) / 2
            rounded.append(100 * found.ranked_by[metric] - mean_of_both)
    assert largest(differences, "CJRC") < 1e-9
    assert largest(rounded, "CJRC, per cent with one digit") < 0.0501


@dataclass
class Table:
    """A submission of KCT, and its gold."""

    gold: list[Row]
    rows: list[Row]
    columns: tuple[str, ...] = ("id", "ret")
    start: str = ""
    end: str = "\n"

    def written(self) -> bytes:
        out = io.StringIO()
        table = csv.writer(out, lineterminator=self.end)
        table.writerow(self.columns)
        names = {"qid": "id", "answer": "ret"}
        for row in self.rows:
            table.writerow([row[names.get(column, column)] for column in self.columns])
        return (self.start + out.getvalue()).encode()

    def damage_a_row(self, draw: random.Random) -> None:
        row = draw.choice(self.rows)
        match draw.randrange(5):
            case 0:
                self.rows.remove(row)
            case 1:
                self.rows.append({**row})
            case 2:
                self.rows.append({**row, "id": "99"})
            case 3:
                row["ret"] = draw.choice(["", "[]", "peru", "NA"])
            case 4:
                row["id"] = draw.choice([f" {row['id']}", "x", ""])

    def change_the_form(self, draw: random.Random) -> None:
        match draw.randrange(9):
            case 0:
                self.columns = draw.choice([("qid", "ret"), ("id", "answer")])
            case 1:
                self.columns = self.columns[::-1]
            case 2:
                self.columns = (*self.columns, "why")
            case 3:
                self.columns = ("why", *self.columns)
                self.rows[0]["why"] = draw.choice(["", "?"])
            case 4:
                self.start = "\ufeff"
            case 5:
                self.end = draw.choice(["\r\n", "\n\n"])
            case 6:
                self.rows = [{**row, "id": row["id"].lstrip("0")} for row in self.rows]
            case 7:
                self.gold = [{**row, "qid": int(row["qid"])} for row in self.gold]
            case 8:
                draw.shuffle(self.rows)


def drawn_table(draw: random.Random) -> Table:
    def text() -> str:
        words = draw.choices(["The", "sea", "a", "red", "SEA,", "-", "11"], k=draw.randint(1, 4))
        return " ".join(words)

    table = Table([], [])
    for number in range(1, draw.randint(3, 6)):
        key = f"{number:04}"
        answers = [text() for _ in range(draw.randint(1, 3))]
        told = [draw.choice([text(), "", *answers]) for _ in range(draw.randint(1, 8))]
        query = draw.choice(["x [MASK]", "x", "[MASK] [MASK]"])
        table.gold.append({"qid": key, "query": query, "answer": answers})
        table.rows.append({"id": key, "ret": dump(told), "why": "-"})
    for _ in range(draw.choice([0, 1, 1, 2])):
        table.change_the_form(draw)
    if draw.random() < 0.4:
        table.damage_a_row(draw)
    return table


def test_kct_scores_damaged_submissions_alike(tmp_path: Path) -> None:
    """Where their script gives a score, ours is the same; where it gives none, we say so."""
    code = official("BDCI509_Reproduction") / "data/code/BERT"
    jobs, ours = [], []
    for seed in range(DAMAGED):
        table = drawn_table(random.Random(seed))
        path = write_lines(tmp_path / f"gold-{seed}.jsonl", table.gold)
        submission = tmp_path / f"{seed}.csv"
        submission.write_bytes(table.written())
        jobs.append({"gold": str(path), "submission": str(submission)})
        try:
            scores = score(Reader(load_task("cloze")), path, submission)
            ours.append(None if scores.void else scores.total.mean["f1"])
        except UserError:
            ours.append(None)
    theirs = organisers_say("cloze", code, jobs, tmp_path)
    scored = []
    for job, found, expected in zip(jobs, ours, theirs, strict=True):
        official_score = None if isinstance(expected, str) else expected[2]
        assert (found is None) == (official_score is None), (job, found, expected)
        if found is not None and official_score is not None:
            scored.append(found - official_score)
    assert largest(scored, "KCT") <= 5.1e-6  # they round to five digits
    assert len(scored) < len(jobs), "some have no score"


@pytest.mark.parametrize("name", CLASSES)
def test_fairlex_scores_damaged_submissions_alike(tmp_path: Path, name: str) -> None:
    """Overall and by groups, three of them; their code cannot score a missing answer."""
    code = official("fairlex")
    size, several = CLASSES[name]
    words = load_task(name).score.order["class"]
    jobs, ours = [], []
    for seed in range(DAMAGED):
        draw = random.Random(seed)

        def labels(draw: random.Random = draw) -> Any:
            if several:
                return draw.sample(range(size), draw.choice([0, 1, 1, 2]))
            return draw.choice([0, 1, size - 1, draw.randrange(size)])

        gold = [labels() for _ in range(draw.randint(1, 20))]
        told = [right if draw.random() < 0.6 else labels() for right in gold]
        groups = [draw.randrange(3) for _ in gold]
        key = "labels" if several else "label"
        cases, rows = [], []
        for number, (right, given, group) in enumerate(zip(gold, told, groups, strict=True)):
            case = {"id": number, "text": "…", "groups": {"g": f"g{group}"}}
            cases.append({**case, key: words[right] if name == "scotus" else right})
            rows.append({"id": number, key: words[given] if name == "scotus" else given})
        path = write_lines(tmp_path / "gold.jsonl", cases)
        submission = write_lines(tmp_path / "submission.jsonl", rows)
        ours.append(score(Reader(load_task(name)), path, submission))
        jobs.append({"task": name, "classes": size, "gold": gold, "told": told, "groups": groups})
    theirs = organisers_say("fairlex", code, jobs, tmp_path)
    differences = []
    for found, expected in zip(ours, theirs, strict=True):
        differences.append(found.total.mean["macro_f1"] - expected["F1-macro_all"])
        for name_of_group, summary in found.groups["g"].items():
            their = expected[f"F1-macro_group:{name_of_group[1:]}"]
            differences.append(summary.mean["macro_f1"] - their)
    assert largest(differences, name) < 1e-6  # they keep 32 bits
