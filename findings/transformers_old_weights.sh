#!/usr/bin/env bash
# transformers: after a model is saved in shards into a folder that has an older single file,
# from_pretrained loads the older model.
#
# packages   transformers 5.19.0, torch 2.13.0 (CPU)
# seen       2026-11-28, Python 3.11
#
# One expects from_pretrained to return what save_pretrained has just written into the same folder.
# If the folder holds a single model.safetensors and the new save is split into shards (more
# weights, or a smaller max_shard_size), the single file stays beside the shards and their index,
# and loading prefers it: the old weights come back, without a warning. In the other order (shards,
# then one file) the new weights are loaded; only the old index is left behind.
# Why it matters: one repeats an experiment and saves the merged model into the same folder again.
# The evaluation then measures the old model, while a program that reads the index has the new one.
# Empty the folder first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
packages=(torch==2.13.0+cpu transformers==5.19.0)
"$work/venv/bin/pip" install --quiet "${packages[@]}" ||
  "$work/venv/bin/pip" install --quiet "${packages[@]}" \
    --extra-index-url https://download.pytorch.org/whl/cpu
cd "$work"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
CONFIG = Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2)
ONE_FILE, SHARDS = "1GB", "30KB"


def is_same(a, b):
    return all(torch.equal(*pair) for pair in zip(a.state_dict().values(), b.state_dict().values()))


def loaded_after(folder, first_size, second_size):
    old, new = Qwen2ForCausalLM(CONFIG), Qwen2ForCausalLM(CONFIG)
    old.save_pretrained(folder, max_shard_size=first_size)
    new.save_pretrained(folder, max_shard_size=second_size)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    return "old" if is_same(loaded, old) else "new" if is_same(loaded, new) else "neither"


seen = {
    "one file, then one file": loaded_after("a", ONE_FILE, ONE_FILE),
    "shards, then one file": loaded_after("b", SHARDS, ONE_FILE),
    "one file, then shards": loaded_after("c", ONE_FILE, SHARDS),
}
for saves, which in seen.items():
    print(f"{saves:26} loads the {which} weights")
print("files of the last:", *sorted(path.name for path in Path("c").glob("model*")))
expected = dict.fromkeys(seen, "new") | {"one file, then shards": "old"}
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
