"""Add the outcomes of the nearest training cases to each case of some files, as `precedents`.

    python tests/bench/precedents.py OUT train.jsonl,single.jsonl FILE [FILE ...] [--nearest 2]

The nearest cases are those with the most similar whole text by the vectors of the text classifier,
names masked, among the cases of the first files that training does not hold out, without the case
itself. Each FILE is written to OUT with its rows as they are and one more field, in words: for
finetune/EXPERIMENTS.md, whose prompt had a place for it.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from panjue.eval.classifier import Hashes, views
from panjue.finetune.classifier import fit_view
from panjue.prompts.example import Example
from panjue.prompts.plumbing.files import dump, read_lines
from panjue.prompts.reader import Reader, is_held_out, text_hash
from panjue.prompts.task import load_task

MOST_OUTCOMES = 4
"""Different outcomes of one case that are told."""


def whole_text(example: Example) -> Hashes:
    """Return the n-grams of the whole text."""
    return views(example, 1)[0][0]


def outcome(example: Example) -> str:
    """Return the different judgments of a case in words, the commonest first."""
    assert example.answer is not None
    told = Counter(
        "，".join(("、".join(j["charges"]), "、".join(j["articles"]), j["penalty"]))
        for j in example.answer["judgments"]
    )
    return "；".join(
        f"{count}人{words}" if count > 1 else words
        for words, count in told.most_common(MOST_OUTCOMES)
    )


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("pool")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--nearest", type=int, default=2)
    args = parser.parse_args()
    reader = Reader(load_task("judgment"))
    pool = {
        text_hash(example): example
        for path in args.pool.split(",")
        for example in reader.read(Path(path))
        if not is_held_out(example)
    }
    cases, own = list(pool.values()), {key: i for i, key in enumerate(pool)}
    texts = [whole_text(example) for example in cases]
    view = fit_view(texts)
    known = view.rows(texts)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.files:
        rows = [row for _, row in read_lines(path)]
        examples = [reader.task.data.read(row) for row in rows]
        similar = (view.rows([whole_text(e) for e in examples]) @ known.T).toarray()
        for row, example, likeness in zip(rows, examples, similar, strict=True):
            if (key := text_hash(example)) in own:
                likeness[own[key]] = -1
            nearest = np.argsort(-likeness, kind="stable")[: args.nearest]
            row["precedents"] = "\n".join(
                f"{i}. {outcome(cases[n])}" for i, n in enumerate(nearest, 1)
            )
        (args.out / path.name).write_text("".join(f"{dump(row)}\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
