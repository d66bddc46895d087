"""Families of bases: each is planned, trained and merged, or refused in one line.

With `make torture` they also answer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from panjue.finetune.library_settings import trainer_config
from panjue.finetune.model import MAX_CONTAMINATION, contamination, load_model, problem_in_packs
from panjue.finetune.packed_attention import (
    MAX_CHANGE,
    SHORT_TOKENS,
    change,
    probed,
    use_packed_attention,
)
from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train
from panjue.finetune.trained import read_trained
from panjue.prompts.architecture import load_language_model
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.tasks.judgment.demo import write_demo
from panjue.serve.merge import served_model
from tests.families import FAMILIES, make_family

# peft looks for the experts that transformers has joined under their old names too.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)

YAML = """
sft:
  run: nowhere
  model: nowhere
  train: {folder}/demo/train.jsonl
  batch: 4
  max_tokens: 1024
  dtype: float32
  lora: {{r: 4, target_modules: all-linear}}
  trainer: {{max_steps: 10, packing: auto, learning_rate: 2.0e-3, logging_steps: 10,
    save_strategy: "no", eval_strategy: "no"}}
"""

OTHER_ATTENTION: set[str] = set()
LEAKING = {"qwen3-next", "qwen3.5", "qwen3.5-moe", "opt", "recurrent-gemma"}
"""In these an example in a pack sees the one before it."""

MENDED = {"falcon"}
"""In these it does with transformers 5.19, and does not with 5.24."""

UNKNOWN = {"recurrent-gemma"}
"""vLLM has no class for them."""

NEEDS_TORCHVISION = {"qwen3.5", "qwen3.5-moe"}
if find_spec("torchvision") or not find_spec("vllm"):
    NEEDS_TORCHVISION = set()
"""What vLLM cannot import here: torchvision is only beside a torch for a GPU."""

UNANSWERED = NEEDS_TORCHVISION | {"deepseek-v3", "qwen3-next"}
"""Those too that vLLM on a CPU does not answer with: it has no kernel for so small a head."""

MERGED_ONLY = {"qwen3-moe", "falcon", "glm4"}
MERGED_ONLY |= set() if find_spec("torchvision") else {"gemma3"}
"""vLLM cannot load their adapters unmerged: of experts, of layers that it has in parts, it has
none for the class, or it has to import torchvision for the whole base."""

ANSWERED = sorted(FAMILIES.keys() - UNKNOWN - UNANSWERED)

USUAL = {"qwen3", "qwen3.5", "phi4"}
"""One of each kind: whose examples are packed, one that also sees, and with joined weights. `make
test` trains and merges these, `make torture` trains and asks all."""


def families(names: Iterable[str]) -> list[Any]:
    """Return the families as parameters of a test; `make test` leaves the unusual ones out."""
    marks = {name: [] if name in USUAL else [pytest.mark.endurance] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in sorted(marks)]


@pytest.fixture(scope="module")
def base_of(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes the tiny base of a family, once."""
    folder = tmp_path_factory.mktemp("bases")
    return cache(lambda name: make_family(name, workshop / "base/model", folder / name))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs, with their cases and their config."""
    folder = tmp_path_factory.mktemp("families")
    write_demo(folder / "demo", {"train": 40, "test": 8})
    (folder / "sft.yaml").write_text(YAML.format(folder=folder), "utf-8")
    return folder


@pytest.fixture(scope="module")
def run_of(base_of: Callable[[str], Path], ground: Path) -> Callable[[str], Path]:
    """Return what trains a family, once, for ten steps."""

    def run(name: str) -> Path:
        train(sft_settings(ground / "sft.yaml", [f"run={ground}/{name}", f"model={base_of(name)}"]))
        return ground / name

    return cache(run)


@pytest.fixture(scope="module")
def answers(run_of: Callable[[str], Path], ground: Path) -> dict[tuple[str, str], Any]:
    """Return (family, how its adapter is used) -> eight replies."""
    runs = [run_of(name) for name in ANSWERED]
    script = Path(__file__).with_name("answer_families.py")
    words = [sys.executable, str(script), str(ground / "demo/test.jsonl"), *map(str, runs)]
    root = {"PYTHONPATH": os.pathsep.join([str(script.parents[1]), *sys.path])}
    done = subprocess.run(words, env={**os.environ, **root}, stdout=-1, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    found = [json.loads(line.removeprefix("found: ")) for line in lines]
    return {(name, adapter): each for name, adapter, each in found}


@pytest.fixture(scope="module")
def leaks(base_of: Callable[[str], Path]) -> Callable[[str], bool]:
    """Return what says whether an example in a pack of a family sees the one before it."""

    def is_leaking(name: str) -> bool:
        model = load_language_model(base_of(name), dtype=torch.float32).eval()
        found = packed_against_alone(model) > MAX_CONTAMINATION
        assert found == (name in LEAKING) or name in MENDED
        return found

    return cache(is_leaking)


@torch.no_grad()
def packed_against_alone(model: Any) -> float:
    """Return the largest difference of an example's logits, in their standard deviations."""
    ids = torch.arange(5, 5 + 2 * SHORT_TOKENS)[None]
    positions = torch.arange(SHORT_TOKENS).repeat(1, 2)
    packed = model(ids, position_ids=positions, use_cache=False).logits[:, SHORT_TOKENS:]
    alone = model(ids[:, SHORT_TOKENS:], use_cache=False).logits
    return float((packed - alone).abs().max() / alone.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_model_says_whether_it_keeps_examples_apart(
    name: str, dtype: torch.dtype, base_of: Callable[[str], Path], leaks: Callable[[str], bool]
) -> None:
    model = load_language_model(base_of(name), dtype=dtype).eval()
    found = contamination(model)
    assert found > 100 * MAX_CONTAMINATION if leaks(name) else found < MAX_CONTAMINATION / 100
    assert bool(problem_in_packs(model, 128)) == leaks(name), "128: longer than windows"


@pytest.mark.parametrize("name", families(FAMILIES.keys() - UNKNOWN))
def test_a_family_is_planned_trained_and_merged(
    name: str,
    run_of: Callable[[str], Path],
    leaks: Callable[[str], bool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of(name)
    plan = capsys.readouterr().out
    assert ("examples are grouped by length" in plan) == leaks(name)
    assert ("No module named 'torchvision'" in plan) == (name in NEEDS_TORCHVISION)
    [loss] = [row["loss"] for _, row in read_lines(run / "log.jsonl") if "loss" in row]
    assert 0 < loss < 20
    model = served_model(read_trained(run / "adapter"), "merge").model  # it compares the outputs
    assert not [key for key in load_language_model(model).state_dict() if "vision" in key]


@pytest.mark.parametrize("name", families(FAMILIES.keys() - UNKNOWN))
def test_a_training_starts_from_the_adapter_of_a_family(
    name: str, run_of: Callable[[str], Path], ground: Path
) -> None:
    run = run_of(name)
    config = sft_settings(ground / "sft.yaml", [f"run={ground}/next", f"from={run}", "model=null"])
    model = load_model(config, Path(config.model), trainer_config(config))
    before = load_file(run / "adapter/adapter_model.safetensors")
    model.save_pretrained(ground / f"next-{name}")  # as a training saves it
    now = load_file(ground / f"next-{name}/adapter_model.safetensors")
    assert now.keys() == before.keys()
    assert all(torch.equal(now[weight], before[weight]) for weight in before)


def test_what_vllm_does_not_know_is_refused_before_anything_is_read(
    base_of: Callable[[str], Path], run_of: Callable[[str], Path]
) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(UserError, match=r"^RecurrentGemmaForCausalLM: vLLM cannot answer with it"):
        run_of("recurrent-gemma")


@pytest.mark.endurance
@pytest.mark.parametrize("name", ANSWERED)
def test_a_family_answers_under_the_schema(name: str, answers: dict[tuple[str, str], Any]) -> None:
    found = answers[name, "merge"]
    assert len(found["texts"]) == 8
    for text, schema in zip(found["texts"], found["schemas"], strict=True):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.endurance
@pytest.mark.parametrize("name", ANSWERED)
def test_a_family_answers_unmerged_as_merged(
    name: str, answers: dict[tuple[str, str], Any]
) -> None:
    merged = answers[name, "merge"]
    unmerged = answers[name, "lora"]
    assert ("error" in unmerged) == (name in MERGED_ONLY), unmerged
    if name in MERGED_ONLY:
        return
    assert unmerged["chances"] == pytest.approx(merged["chances"], abs=1e-2)
    assert unmerged["texts"] == merged["texts"]


@pytest.mark.parametrize("name", families(FAMILIES.keys() - LEAKING - MENDED))
def test_packs_without_a_mask_are_those_with_one(name: str, base_of: Callable[[str], Path]) -> None:
    model = load_language_model(base_of(name), dtype=torch.float32).eval()
    masks = probed(model, 80, packed=True)
    is_used = use_packed_attention(model, 128, torch.float32)
    assert is_used == (name not in OTHER_ATTENTION)
    assert change(masks, probed(model, 80, packed=True)) < MAX_CHANGE[torch.float32]
