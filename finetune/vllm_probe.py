"""Find out whether vLLM can answer with a model, before hours of training."""

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ASK_VLLM = """
import sys, transformers
from vllm.model_executor.models.registry import ModelRegistry
name = sys.argv[1]
known = ModelRegistry.models.get(name)
if known:
    known.load_model_cls()
    sys.exit()
model = getattr(transformers, name)
if model._is_stateful or not model.is_backend_compatible():
    sys.exit("unknown")
"""
"""Program that fails if vLLM cannot load the class of a model. Its last line is the reason.

If vLLM has no class for a model, it runs the class of transformers, but only if no layer has a
state.
"""

UNKNOWN_TO_VLLM = "unknown"
"""The reason of ASK_VLLM if vLLM cannot answer on any machine."""


def is_listed(architecture: str) -> bool:
    """Say whether vLLM has its own class for a model; read vLLM's source without importing it."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return False
    source = Path(vllm.origin).parent / "model_executor/models/registry.py"
    return f'"{architecture}"' in source.read_text("utf-8")


@cache
def vllm_problem(architecture: str) -> str:
    """Return why vLLM cannot load models of a class here; empty if it can, or is not installed.

    The reason is the last line of the program ASK_VLLM: `UNKNOWN_TO_VLLM` if neither vLLM nor
    transformers has a class that vLLM can run. The program takes some ten seconds. It is a process
    of its own, because importing vLLM changes settings.
    """
    words = [sys.executable, "-P", "-c", ASK_VLLM, architecture]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    reason = (done.stderr.strip().splitlines() or ["it ended"])[-1]
    is_installed = "No module named 'vllm" not in reason
    return reason if done.returncode and is_installed else ""
