#!/usr/bin/env bash
# transformers: Gemma 2 loses the softcap of its attention, unless one asks for eager attention.
#
# packages   transformers 5.19.0, torch 2.13.0 (CPU)
# seen       2026-11-30, Python 3.11
#
# Gemma 2 limits its attention scores with tanh (attn_logit_softcapping, 50 in the published
# models). One expects a model to compute that whatever the attention's implementation is, or an
# error. The default is sdpa, which leaves the limit out without a warning: a model with a limit of
# 2 gives exactly the outputs of the same model without any. With eager, the outputs differ.
# transformers 5.24.0 refuses sdpa for this model.
# Why it matters: a LoRA is trained on a model that is not Gemma 2, and answers in an engine that
# computes the limit. How much the published models change was not measured. Load Gemma 2 with
# attn_implementation="eager".
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
import warnings

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
OTHERS = {"query_pre_attn_scalar": 8, "final_logit_softcapping": None, "initializer_range": 0.6}


def outputs(softcap, implementation):
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, **HEADS, **OTHERS, attn_logit_softcapping=softcap)
    if implementation != "default":
        config._attn_implementation = implementation
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        return model.config._attn_implementation, model(torch.arange(40)[None]).logits


seen = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for implementation in ("default", "sdpa", "eager"):
        used, limited = outputs(2.0, implementation)
        _, unlimited = outputs(None, implementation)
        seen[implementation] = (used, bool(torch.equal(limited, unlimited)))
about = [str(warning.message) for warning in caught if "softcap" in str(warning.message).lower()]
for implementation, (used, is_equal) in seen.items():
    print(f"{implementation:8} is {used}: outputs with and without the limit are", end=" ")
    print("equal" if is_equal else "different")
print("warnings about it:", about)
expected = {"default": ("sdpa", True), "sdpa": ("sdpa", True), "eager": ("eager", False)}
if seen != expected or about:
    sys.exit(f"changed; on 2026-11-30 it was {expected}, without a warning")
PYTHON
