"""Cut a reading file (CJRC) in two by the hash of each document's `caseid`: 80% and 20%.

    python tests/bench/split.py dev.json train.json test.json [--longest 400] [--questions 100]

All questions of a document fall into the same part. `--longest` leaves documents of more
characters out of the first part, `--questions` ends the second after so many; it is in the order
of the hashes, so that its beginning is a fair choice.
"""

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.documents import list_items
from panjue.prompts.plumbing.files import write_json


def chosen_by(document: dict[str, Any]) -> int:
    """Return the number that decides; a fifth of them are multiples of five."""
    return int(hashlib.sha256(str(document["caseid"]).encode()).hexdigest()[:8], 16)


def is_short(document: dict[str, Any], longest: int) -> bool:
    """Say whether no text of the document has more characters."""
    return all(len(paragraph["context"]) <= longest for paragraph in document["paragraphs"])


def first_questions(documents: Iterable[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the documents of the first `most` questions, the last one's cut to them."""
    kept = []
    for document in documents:
        for paragraph in document["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:most]
            most -= len(paragraph["qas"])
        kept.append(document)
        if most <= 0:
            break
    return kept


def main() -> None:
    """Write both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("whole", "train", "test"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--longest", type=int, default=10**9)
    parser.add_argument("--questions", type=int, default=10**9)
    args = parser.parse_args()
    documents = list(list_items(args.whole, "data"))
    first = [d for d in documents if chosen_by(d) % 5 and is_short(d, args.longest)]
    others = sorted((d for d in documents if chosen_by(d) % 5 == 0), key=chosen_by)
    second = first_questions(others, args.questions)
    for path, part in ((args.train, first), (args.test, second)):
        write_json(path, {"data": part})
        asked = sum(len(p["qas"]) for d in part for p in d["paragraphs"])
        print(f"{path}: {len(part)} documents, {asked} questions")


if __name__ == "__main__":
    main()
