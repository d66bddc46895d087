#!/usr/bin/env bash
# xgrammar: a string with a limit on its length can hold no quotation mark, no line break and no
# backslash.
#
# package    xgrammar 0.2.8 (with torch 2.13.0, CPU, which it imports)
# seen       2026-11-28, Python 3.11
#
# One expects {"type": "string", "maxLength": 200} to be {"type": "string"} with at most 200
# characters. But as soon as there is a maxLength, or a minLength above 0, every escape of JSON is
# forbidden: \" \\ \n \t \u0001.
# Why it matters: a limit is what one sets on a free text (a reason, a summary) so that a reply
# cannot run on. With it, a model that was trained to quote or to write paragraphs cannot: at the
# place of the mark it must close the string or take another character. Nothing is raised, the reply
# is valid, and the text is not what the model would have written. Without a limit all of it can be
# written. Reported to xgrammar as issue 800.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
packages=(torch==2.13.0+cpu transformers==5.19.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.3)
"$work/venv/bin/pip" install --quiet "${packages[@]}" ||
  "$work/venv/bin/pip" install --quiet "${packages[@]}" \
    --extra-index-url https://download.pytorch.org/whl/cpu
"$work/venv/bin/pip" install --quiet --no-deps --no-warn-conflicts xgrammar==0.2.8
cd "$work"
venv/bin/python - <<'PYTHON'
import json
import sys

import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

TEXTS = {
    "plain": "He took the bicycle.",
    "Chinese quotation marks": "他说“走”。",
    "quotation marks": 'He said "go".',
    "line break": "First.\nSecond.",
    "backslash": "C:\\case",
    "tab": "a\tb",
}
SCHEMAS = {
    "no limit": {"type": "string"},
    "maxLength 200": {"type": "string", "maxLength": 200},
    "minLength 1": {"type": "string", "minLength": 1},
}


def can_write(schema, text):
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    return accepts(grammar, json.dumps(text, ensure_ascii=False))


seen = {
    limit: [name for name, text in TEXTS.items() if not can_write(schema, text)]
    for limit, schema in SCHEMAS.items()
}
for limit, refused in seen.items():
    print(f"{limit:14} cannot be written: {', '.join(refused) or 'nothing'}")
with_escapes = ["quotation marks", "line break", "backslash", "tab"]
expected = {"no limit": [], "maxLength 200": with_escapes, "minLength 1": with_escapes}
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
