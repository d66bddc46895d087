#!/usr/bin/env bash
# Readers of unfinished JSON: a number that was cut is returned as if it were whole, so that 120
# months become 12.
#
# packages   jiter 0.19.0, partial-json-parser 0.2.1.1.post7, json-repair 0.64.6
# seen       2026-11-28, Python 3.11
#
# A reply that ends at its token limit is cut anywhere. One expects a reader of such replies to
# return what is certain, and jiter has a mode for that: partial_mode="on" leaves out a text whose
# closing quote is missing. For a number, which has no end sign, it does not: {"months": 12 may be
# the start of 120, and all three libraries return 12, jiter in both modes. A number cut where none
# can end (5000.) is left out by jiter; the other two return 5000.
# Why it matters: the value has the right type and range, so no schema objects to it. Whoever scores
# or shows such replies has terms and fines that nobody wrote. Only partial-json-parser can be told
# to leave the last number out (Allow without NUM).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet \
  jiter==0.19.0 partial-json-parser==0.2.1.1.post7 json-repair==0.64.6
cd "$work"
venv/bin/python - <<'PYTHON'
import sys

import jiter
import json_repair
import partial_json_parser
from partial_json_parser import Allow

WHOLE = '{"months": 120, "fine": 5000.75, "name": "Xu"}'
CUTS = ['{"months": 12', '{"months": 120, "fine": 5000.', '{"name": "X']
READERS = {
    "jiter on": lambda text: jiter.from_json(text.encode(), partial_mode="on"),
    "jiter trailing": lambda text: jiter.from_json(
        text.encode(), partial_mode="trailing-strings"
    ),
    "partial-json-parser": partial_json_parser.loads,
    "without NUM": lambda text: partial_json_parser.loads(text, Allow.ALL & ~Allow.NUM),
    "json-repair": json_repair.loads,
}
expected = {
    "jiter on": [{"months": 12}, {"months": 120}, {}],
    "jiter trailing": [{"months": 12}, {"months": 120}, {"name": "X"}],
    "partial-json-parser": [{"months": 12}, {"months": 120, "fine": 5000}, {"name": "X"}],
    "without NUM": [{}, {"months": 120}, {"name": "X"}],
    "json-repair": [{"months": 12}, {"months": 120, "fine": 5000}, {"name": "X"}],
}
print("the whole reply:", WHOLE)
seen = {name: [read(cut) for cut in CUTS] for name, read in READERS.items()}
for number, cut in enumerate(CUTS):
    print("cut:", cut)
    for name, values in seen.items():
        print(f"    {name:20} {values[number]}")
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
