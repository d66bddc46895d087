#!/usr/bin/env bash
# Chat templates: the same conversation in the two forms that the chat format allows gives two
# different training texts, or an empty one.
#
# packages   trl 1.16.0 (its chat_templates folder holds the templates of the model families),
#            transformers 5.19.0
# seen       2026-11-28, Python 3.11, no torch needed
#
# A message's content is a text, or a list of parts: [{"type": "text", "text": "..."}]. A server
# like OpenAI's takes both and means the same by them, so one expects a trainer to do so too. The
# template of the family decides:
#   Gemma 3, Qwen3.5   the same prompt for both
#   Qwen3              keeps neither the question nor the answer: the row is an empty reply to an
#                      empty question, without a warning
#   Llama 3.1, Gemma   write the list as Python prints it, with single quotes: the reply trained on
#                      is no JSON
#   LFM2               writes the list as JSON: the answer becomes a string within a list within the
#                      reply
#   Qwen2.5            raises an error
# Why it matters: logs of chat APIs and data of multimodal models have parts. trl's SFTTrainer hands
# them to the template as they are and trains without an error (tried, not in this script): Qwen3
# learns to answer nothing, Llama to write Python lists. Join the parts to one text first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.19.0 jinja2==3.1.6
"$work/venv/bin/pip" install --quiet --no-deps --no-warn-conflicts trl==1.16.0
cd "$work"
venv/bin/python - <<'PYTHON'
import sys
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(find_spec("trl").origin).parent / "chat_templates"
QUESTION = "What did the court decide?"
ANSWER = '{"name": "甲", "months": 12}'


def as_text(text):
    return text


def as_parts(text):
    return [{"type": "text", "text": text}]


def render(family, content_of):
    conversation = [
        {"role": "user", "content": content_of(QUESTION)},
        {"role": "assistant", "content": content_of(ANSWER)},
    ]
    template = (FOLDER / f"{family}.jinja").read_text("utf-8")
    prompts, _ = render_jinja_template(
        [conversation], chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    return prompts[0]


def what_becomes_of_parts(family):
    try:
        prompt = render(family, as_parts)
    except Exception as error:
        return f"raises {type(error).__name__}"
    if prompt == render(family, as_text):
        return "same as text"
    if QUESTION not in prompt and "months" not in prompt:
        return "question and answer are lost"
    return "as Python prints it" if "[{'type'" in prompt else "as JSON"


expected = {
    "gemma3": "same as text",
    "qwen3_5_nothink": "same as text",
    "qwen3": "question and answer are lost",
    "qwen3_instruct_2507": "question and answer are lost",
    "llama3_1": "as Python prints it",
    "gemma": "as Python prints it",
    "lfm2": "as JSON",
    "qwen2_5": "raises TypeError",
}
seen = {family: what_becomes_of_parts(family) for family in expected}
for family, what in seen.items():
    print(f"{family:20} {what}")
print("qwen3 trains on:", repr(render("qwen3", as_parts)))
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
