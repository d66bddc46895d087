#!/usr/bin/env bash
# OpenCC: the conversion to simplified Chinese also changes simplified text, and gives two
# defendants one name.
#
# package    OpenCC 1.4.2
# seen       2026-11-28, Python 3.11
#
# Collections of judgments mix traditional and simplified characters, so one runs t2s over all of it
# and expects simplified text to stay as it is. The conversion goes by character where no phrase of
# its list matches, and some characters that are simplified text are also the traditional form of
# another: 昇 becomes 升, 乾 (the name's qián) becomes 干. So 王昇 and 王升, two defendants of one
# case, become the same name, and the name in the facts is no longer the one in the gold file if
# only one of the two was converted. Words with such characters (乾坤) are in the list and stay.
# Why it matters: names are the keys by which defendants are matched. Leave names and labels out of
# the conversion, and put the names back into the converted facts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet opencc==1.4.2
cd "$work"
venv/bin/python - <<'PYTHON'
import sys

from opencc import OpenCC

convert = OpenCC("t2s").convert
expected = {
    "被告人王昇伙同王升盗窃。": "被告人王升伙同王升盗窃。",
    "被告人徐乾某到案。": "被告人徐干某到案。",
    "乾坤": "乾坤",
    "盗窃罪": "盗窃罪",
}
seen = {text: convert(text) for text in expected}
for text, converted in seen.items():
    print(f"{text} -> {converted}")
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
