#!/usr/bin/env bash
# inspect_ai: an answer that counts as right in English counts as wrong in Chinese, because of its
# full stop or because no space surrounds a number.
#
# package    inspect_ai 0.3.285
# seen       2026-11-28, Python 3.11, no model is asked
#
# The scorers exact, f1 and match ignore punctuation and find a number within a sentence, so one
# expects 盗窃罪。 to match 盗窃罪 as "theft." matches "theft". Only ASCII punctuation is taken off:
# 。 and ， stay, and so do “ ” and 《 》. f1 splits at spaces: two charges of which one is right
# have 0.67 in English and 0 in Chinese. match(numeric=True) finds the 12 of "The term is 12
# months." and not that of 刑期是12个月。 Chinese numerals it reads: 十二 is 12. Only location="any"
# finds what stands in a Chinese sentence, as a substring (徐某 in 徐某甲).
# Why it matters: a model compared in two languages looks far worse in Chinese only because of the
# scorers. Strip Chinese punctuation before scoring, or compare structured answers field by field.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet inspect_ai==0.3.285
cd "$work"
venv/bin/python - <<'PYTHON'
import asyncio
import sys

from inspect_ai.model import ModelName, ModelOutput
from inspect_ai.scorer import Target, exact, f1, match
from inspect_ai.solver import TaskState

SCORERS = {
    "exact": exact(),
    "f1": f1(),
    "number": match(numeric=True),
    "any": match(location="any"),
}


def score(scorer, answer, target):
    state = TaskState(
        model=ModelName("mockllm/model"),
        sample_id=1,
        epoch=1,
        input="",
        messages=[],
        output=ModelOutput.from_content("mockllm/model", answer),
    )
    return asyncio.run(SCORERS[scorer](state, Target(target))).value


expected = {
    ("exact", "theft.", "theft"): "C",
    ("exact", "盗窃罪。", "盗窃罪"): "I",
    ("f1", "theft, fraud", "theft"): 0.67,
    ("f1", "盗窃罪，诈骗罪", "盗窃罪"): 0.0,
    ("number", "The term is 12 months.", "12"): "C",
    ("number", "刑期是12个月。", "12"): "I",
    ("number", "12.", "12"): "C",
    ("number", "12。", "12"): "I",
    ("number", "十二", "12"): "C",
    ("any", "徐某甲", "徐某"): "C",
}
seen = {(scorer, *pair): score(scorer, *pair) for scorer, *pair in expected}
for (scorer, answer, target), value in seen.items():
    print(f"{scorer:7} {value}  {answer} | {target}")
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
