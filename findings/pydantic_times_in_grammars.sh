#!/usr/bin/env bash
# pydantic and llguidance: a grammar made from the schema of a class refuses what the class writes.
#
# packages   pydantic 2.14.3, llguidance 1.7.6, jsonschema 4.26.0
# seen       2026-11-28, Python 3.11
#
# One makes training targets by model_dump_json() and the grammar for decoding from
# model_json_schema() of the same class, and expects each target to be a sentence of that grammar.
# For a datetime without a time zone, as documents state them, it is not: pydantic writes
# "2021-03-05T09:30:00", while its schema says "format": "date-time", which wants an offset, and
# llguidance holds to it. (jsonschema, whose formats are not checked unless one asks, calls the
# target valid.)
# Why it matters: after the minutes the trained model wants to close the string and is forced to
# write Z or an offset that the text never had. The value then differs from gold, and comparing the
# two by < raises a TypeError. Give the field a pattern of its own (a str), or write an offset in
# all targets.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pydantic==2.14.3 llguidance==1.7.6 jsonschema==4.26.0
cd "$work"
venv/bin/python - <<'PYTHON'
import json
import sys
from datetime import datetime

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

TOKENIZER = LLTokenizer("byte")


class Hearing(BaseModel):
    opened: datetime


SCHEMA = Hearing.model_json_schema()
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))


def written_up_to(text):
    """The part of a text that the grammar can write."""
    matcher = LLMatcher(TOKENIZER, GRAMMAR)
    accepted = matcher.try_consume_tokens(TOKENIZER.tokenize_str(text))
    return text.encode()[:accepted].decode()


gold = Hearing(opened=datetime(2021, 3, 5, 9, 30))
target = gold.model_dump_json()
with_zone = target.replace('0"}', '0Z"}')
decoded = Hearing.model_validate_json(with_zone)
seen = {
    "target": target,
    "valid by jsonschema": Draft202012Validator(SCHEMA).is_valid(json.loads(target)),
    "grammar stops after": written_up_to(target),
    "grammar writes the one with Z": written_up_to(with_zone) == with_zone,
    "that one equals gold": decoded == gold,
}
expected = {
    "target": '{"opened":"2021-03-05T09:30:00"}',
    "valid by jsonschema": True,
    "grammar stops after": '{"opened":"2021-03-05T09:30:00',
    "grammar writes the one with Z": True,
    "that one equals gold": False,
}
for name, value in seen.items():
    print(f"{name}: {value}")
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
