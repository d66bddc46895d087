#!/usr/bin/env bash
# datasets: texts that look like dates are read from JSON as times, some as the day before, and
# asking for strings does not bring them back.
#
# packages   datasets 5.2.0, pyarrow 26.0.1
# seen       2026-11-30, Python 3.11
#
# One expects load_dataset("json") to return a JSON string as that string. If every value of a
# column has the form of a date, the column becomes timestamp[s], in UTC and without a zone:
# "2019-08-27T02:00:00+08:00" comes back as 26 August, 18:00. With Features({"answer":
# Value("string")}) one gets "2019-08-27 00:00:00" for "2019-08-27"; to_json writes 1566864000000.
# It depends on the other rows: with one "unknown" among the first, all are strings; with one far
# behind (in another block of 10 MB) the file cannot be loaded.
# Why it matters: the answers to "on which day?" are such a column. A score counts right answers as
# wrong, an offence moves to another day. On a file of questions with such answers alone,
# LLaMA-Factory 0.9.5 drops each row as invalid, and ms-swift 4.6.0 deletes each with "'int' object
# is not iterable". Read the lines with json, and pass them to Dataset.from_list.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$work"
HF_HUB_OFFLINE=1 HF_HOME="$work/hf" venv/bin/python - <<'PYTHON'
import json
import sys
from pathlib import Path

import datasets
from datasets import Dataset, Features, Value, load_dataset

datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)
DAY, HOUR = "2019-08-27", "2019-08-27T02:00:00+08:00"
STRINGS = Features({"answer": Value("string")})


def rows(answers):
    return [{"answer": answer} for answer in answers]


def read(answers, features=None):
    lines = (json.dumps(row) + "\n" for row in rows(answers))
    Path("rows.jsonl").write_text("".join(lines), "utf-8")
    return load_dataset("json", data_files="rows.jsonl", split="train", features=features)


def first(answers, features=None):
    try:
        return str(read(answers, features)[0]["answer"])
    except datasets.exceptions.DatasetGenerationError as error:
        return f"error: {error.__cause__}"


read([DAY, DAY]).to_json("written.jsonl")
written = json.loads(Path("written.jsonl").read_text("utf-8").splitlines()[0])
seen = {
    "days": first([DAY, DAY]),
    "hours": first([HOUR, HOUR]),
    "days, strings asked for": first([DAY, DAY], STRINGS),
    "days, written by to_json": str(written["answer"]),
    "days and a word": first([DAY, "unknown"]),
    "500,000 days and a word": first([*[DAY] * 500_000, "unknown"]),
    "days, from_list": Dataset.from_list(rows([DAY, DAY]))[0]["answer"],
}
for what, answer in seen.items():
    print(f"{what:25} {answer}")
expected = {
    "days": "2019-08-27 00:00:00",
    "hours": "2019-08-26 18:00:00",
    "days, strings asked for": "2019-08-27 00:00:00",
    "days, written by to_json": "1566864000000",
    "days and a word": DAY,
    "500,000 days and a word": (
        "error: Failed to parse string: 'unknown' as a scalar of type timestamp[s]"
    ),
    "days, from_list": DAY,
}
if seen != expected:
    sys.exit(f"changed; on 2026-11-30 it was {expected}")
PYTHON
