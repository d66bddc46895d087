"""Scores without a language model: TF-IDF of characters, and linear SVMs.

    .venv/bin/python tests/bench/tfidf.py TRAIN.jsonl[,MORE.jsonl] TEST.jsonl OUT.jsonl

Writes the submission OUT, which `panjue score TEST.jsonl OUT.jsonl` scores. One classifier per
charge and article, over n-grams of the whole text and of the clauses that name the defendant; one
of all penalty classes. All cases of the training files are used, those that `panjue sft` would hold
out too.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scipy.sparse import csr_array, hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import MultiLabelBinarizer
from sklearn.svm import LinearSVC

from panjue.prompts.example import Example
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

TASK = load_task("judgment")
CLAUSE = re.compile(r"(?<=[。；，])")
MIN_DEFENDANTS = 5
"""With a label; a rarer one is never predicted."""

THRESHOLD = -0.2
"""A label is predicted above this score; where none is, the best one is. This value, `C` and
`MIN_DEFENDANTS` are those of the comparison that this script repeats. What they were chosen on is
not known; it may have been the dev cases."""


def main(train: str, test: Path, out: Path) -> None:
    """Fit, answer every case of `test`, and write the submission."""
    began = time.monotonic()
    known = [e for name in train.split(",") for e in Reader(TASK).read(Path(name))]
    asked = list(Reader(TASK).read(test))
    rows, new = features([*texts(known)], [*texts(asked)])
    gold = [judgment for example in known for judgment in judgments(example)]
    fields = ([g[name] for g in gold] for name in ("charges", "articles"))
    charges, articles = (label_sets(rows, values, new) for values in fields)
    classes = LinearSVC(C=0.1).fit(rows, [g["penalty"] for g in gold]).predict(new)
    predicted = zip(charges, articles, classes, strict=True)
    with out.open("w", encoding="utf-8") as file:
        for example in asked:
            own = [next(predicted) for _ in example.names]
            answer = {
                "judgments": [
                    {"name": name, "charges": c, "articles": a, "penalty": str(penalty)}
                    for name, (c, a, penalty) in zip(example.names, own, strict=True)
                ]
            }
            print(json.dumps(TASK.data.write(example, answer), ensure_ascii=False), file=file)
    print(f"written: {out}; {len(gold)} defendants, {time.monotonic() - began:.0f} s")


def judgments(example: Example) -> list[dict[str, Any]]:
    """Return the gold judgments of a training case."""
    assert example.answer is not None, "training cases have answers"
    gold: list[dict[str, Any]] = example.answer["judgments"]
    return gold


def texts(examples: Sequence[Example]) -> Iterator[tuple[str, str]]:
    """Yield for every defendant the whole text, and the clauses with the name, masked."""
    for example in examples:
        clauses = CLAUSE.split(example.text)
        for name in example.names:
            yield example.text, "".join(s for s in clauses if name in s).replace(name, "<D>")


def features(
    train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]
) -> tuple[csr_array, csr_array]:
    """Return the rows of the defendants of both files."""
    columns = []
    for i in range(2):
        grams = TfidfVectorizer(
            analyzer="char", ngram_range=(1, 3), min_df=5, sublinear_tf=True, max_features=60_000
        )
        fitted = grams.fit_transform([pair[i] for pair in train])
        columns.append((fitted, grams.transform([pair[i] for pair in test])))
    first, second = zip(*columns, strict=True)
    return csr_array(hstack(first)), csr_array(hstack(second))


def label_sets(rows: csr_array, gold: Sequence[list[str]], new: csr_array) -> list[list[str]]:
    """Return the predicted labels of every new row."""
    sets = MultiLabelBinarizer()
    matrix = sets.fit_transform(gold)
    kept = matrix.sum(0) >= MIN_DEFENDANTS
    labels = sets.classes_[kept]
    model = OneVsRestClassifier(LinearSVC(), n_jobs=2).fit(rows, matrix[:, kept])
    scores = model.decision_function(new)
    return [list(labels[row > THRESHOLD]) or [labels[row.argmax()]] for row in scores]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
