#!/usr/bin/env bash
# datasets: in a column that holds a JSON schema for each row, every row gets the keywords of all
# other rows, as null.
#
# packages   datasets 5.2.0, pyarrow 26.0.1, jsonschema 4.26.0
# seen       2026-11-28, Python 3.11
#
# A schema for each case (its names, its admissible labels) is data, so one keeps it in a column.
# One expects a row back as it went in. Dataset.from_list makes one struct of all rows: a row with
# {"const": ...} and one with {"enum": [...]} come back as {"const": ..., "enum": null} and
# {"const": null, "enum": [...]}. The first is no valid schema any more. The second is valid and
# means something else: "const": null allows null alone, so it refuses every answer. The same rows
# through Dataset.map, or read from a file by load_dataset, come back right: there the column has
# type Json.
# Why it matters: whoever decodes under such a schema is told that it cannot be satisfied, far from
# the cause; whoever validates answers with it counts right ones as invalid. Keep schemas as texts,
# or pass features=Features({"schema": Json()}).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1 jsonschema==4.26.0
cd "$work"
HF_HUB_OFFLINE=1 HF_HOME="$work/hf" venv/bin/python - <<'PYTHON'
import json
import sys
from pathlib import Path

import datasets
from datasets import Dataset, load_dataset
from jsonschema import Draft202012Validator

datasets.disable_progress_bars()
ONE = {"type": "object", "properties": {"charge": {"const": "theft"}}}
SEVERAL = {"type": "object", "properties": {"charge": {"enum": ["theft", "fraud"]}}}
ROWS = [{"schema": ONE}, {"schema": SEVERAL}]
ANSWERS = [{"charge": "theft"}, {"charge": "fraud"}]


def judge(schema, answer):
    try:
        Draft202012Validator.check_schema(schema)
    except Exception as error:
        return f"no valid schema: {error.message}"
    return "answer valid" if Draft202012Validator(schema).is_valid(answer) else "answer refused"


Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
ways = {
    "from_list": Dataset.from_list(ROWS),
    "map": Dataset.from_list([{"id": 0}, {"id": 1}]).map(lambda row: ROWS[row["id"]]),
    "load_dataset": load_dataset("json", data_files="rows.jsonl", split="train"),
}
seen = {}
for way, rows in ways.items():
    schemas = [row["schema"] for row in rows]
    seen[way] = [judge(*pair) for pair in zip(schemas, ANSWERS)]
    charges = [json.dumps(schema["properties"]["charge"]) for schema in schemas]
    print(f"{way:13}", *charges, seen[way])
right = ["answer valid", "answer valid"]
changed = ["no valid schema: None is not of type 'array'", "answer refused"]
expected = {"from_list": changed, "map": right, "load_dataset": right}
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
