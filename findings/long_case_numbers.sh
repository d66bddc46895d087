#!/usr/bin/env bash
# Ids of 21 digits: of six readers of JSON lines two keep them, three round them, and pandas returns
# other whole numbers.
#
# packages   pandas 3.1.1, orjson 3.13.0, pyarrow 26.0.1, duckdb 2.0.1, polars 2.1.0
# seen       2026-11-28, Python 3.11
#
# Case numbers of courts and archives, joined from place, year and number, have 20 digits and more.
# JSON has no limit for a whole number, and Python's json keeps all digits, so one expects the same
# id or an error. What comes back:
#   json, polars             110105202100000000123
#   orjson, pyarrow, duckdb  a float, 1.101052021e+20: cases that differ in their last digits become
#                            one case
#   pandas                   17871481731452242043, the number modulo 2**64, as a whole number; one
#                            digit more is an error
# Why it matters: answers are matched to gold by id. A float is seen to be wrong; pandas' number has
# 20 digits like a case number. dtype={"id": str} does not help: it is applied afterwards. Keep ids
# as texts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet \
  pandas==3.1.1 orjson==3.13.0 pyarrow==26.0.1 duckdb==2.0.1 polars==2.1.0
cd "$work"
venv/bin/python - <<'PYTHON'
import json
import sys
from io import StringIO
from pathlib import Path

import duckdb
import orjson
import pandas
import polars
import pyarrow.json

FIRST, SECOND = 110105202100000000123, 110105202100000000124
PATH = Path("cases.jsonl")
PATH.write_text("".join(json.dumps({"id": id}) + "\n" for id in (FIRST, SECOND)), "utf-8")
LINES = PATH.read_text("utf-8").splitlines()

seen = {
    "json": [json.loads(line)["id"] for line in LINES],
    "polars": polars.read_ndjson(PATH)["id"].to_list(),
    "orjson": [orjson.loads(line)["id"] for line in LINES],
    "pyarrow": pyarrow.json.read_json(PATH)["id"].to_pylist(),
    "duckdb": [id for (id,) in duckdb.sql("select id from read_json('cases.jsonl')").fetchall()],
    "pandas": pandas.read_json(PATH, lines=True)["id"].tolist(),
    "pandas, dtype=str": pandas.read_json(PATH, lines=True, dtype={"id": str})["id"].tolist(),
}
exact, rounded = [FIRST, SECOND], [float(FIRST)] * 2
modulo = [FIRST % 2**64, SECOND % 2**64]
expected = dict.fromkeys(seen, rounded)
expected |= {"json": exact, "polars": exact, "pandas": modulo}
expected |= {"pandas, dtype=str": [str(id) for id in modulo]}
for name, ids in seen.items():
    print(f"{name:18}", *ids)
try:
    pandas.read_json(StringIO(json.dumps({"id": FIRST * 10})), lines=True)
    longer = "no error"
except ValueError as error:
    longer = str(error)
print("pandas, 22 digits: ", longer)
if repr(seen) != repr(expected) or "too big" not in longer:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
