#!/usr/bin/env bash
# pydantic: a term of 18 months is read as five days less than one year and six months, and neither
# is written back as it was.
#
# package    pydantic 2.14.3
# seen       2026-11-28, Python 3.11
#
# A term of imprisonment is a duration; JSON Schema has a format for it (ISO 8601: P18M), and
# pydantic's timedelta has that format in its schema. One expects P18M and P1Y6M to be the same
# term. A timedelta has days alone, so pydantic takes 30 days for a month and 365 for a year: 540
# and 545 days. P12M (360 days) is less than P1Y (365). What is read as P18M is written as P1Y175D:
# no months come back, whatever went in.
# Why it matters: under this schema a model may write a term in any of these ways, and exact match,
# sorting and thresholds ("over 36 months") then depend on the spelling. Ask for a whole number of
# months.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pydantic==2.14.3
cd "$work"
venv/bin/python - <<'PYTHON'
import json
import sys
from datetime import timedelta

from pydantic import TypeAdapter

TERM = TypeAdapter(timedelta)
seen = {}
for text in ("P18M", "P1Y6M", "P12M", "P1Y", "P36M", "P3Y"):
    value = TERM.validate_json(json.dumps(text))
    seen[text] = (value.days, json.loads(TERM.dump_json(value)))
    print(f"{text:6} is read as {value.days:5} days and written as {seen[text][1]}")
print("schema:", TERM.json_schema())
expected = {
    "P18M": (540, "P1Y175D"),
    "P1Y6M": (545, "P1Y180D"),
    "P12M": (360, "P360D"),
    "P1Y": (365, "P1Y"),
    "P36M": (1080, "P2Y350D"),
    "P3Y": (1095, "P3Y"),
}
if seen != expected or TERM.json_schema() != {"type": "string", "format": "duration"}:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
