"""How an engine starts: on which cards, with what in its environment, and why it does not."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config
from vllm.config import ModelConfig

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.ask import LONGEST, Budget
from panjue.serve.engine import (
    OWN_ARGUMENTS,
    check_length,
    engine,
    engine_settings,
    longest_of,
    startup_errors,
    with_own,
)
from panjue.serve.merge import Served
from panjue.serve.settings import environment


def test_what_a_gpu_would_compile_at_the_start_is_off_unless_it_is_wanted() -> None:
    """Its compiler is on no machine that has only a driver; what is compiled finds ninja."""
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    programs = str(Path(sys.executable).parent)
    assert programs in os.environ["PATH"].split(os.pathsep)
    wanted = environment({"VLLM_USE_FLASHINFER_SAMPLER": "1", "PATH": "/bin"})
    assert wanted["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert wanted["PATH"] == f"{programs}{os.pathsep}/bin"


def test_an_engine_that_cannot_start_says_its_own_first_error(
    merged: Path, small: dict[str, Any], tmp_path: Path
) -> None:
    model = shutil.copytree(merged, tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with (
        pytest.raises(UserError, match="incomplete metadata") as error,
        engine(Served(model), small["engine"], Budget(3072, 3072), seed=0),
    ):
        pass
    assert "memory" not in str(error.value), "which is no matter here"


@pytest.mark.parametrize(
    ("message", "has_hint"),
    [("CUDA out of memory. Tried to allocate 2 GiB", True), ("ninja: not found", False)],
)
def test_memory_is_named_only_if_it_was_memory(message: str, has_hint: bool) -> None:
    with pytest.raises(UserError, match=f"^engine: {message}") as error, startup_errors():
        raise RuntimeError(message)
    assert ("gpu_memory_utilization" in str(error.value)) == has_hint


ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("context", "rope", "trained", "length"),
    [
        (2**20, None, 1024, LONGEST),
        (2**20, None, 2 * LONGEST, 2 * LONGEST),
        (4096, None, 1024, 4096),
        (2**17, ROPE, 1024, 4096),  # computed as in training
        (2**17, ROPE, 8192, 8192),
    ],
)
def test_the_context_of_a_model_is_used_as_far_as_cases_need_it(
    context: int, rope: Any, trained: int, length: int, tmp_path: Path
) -> None:
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3Config(**shape, max_position_embeddings=context, rope_parameters=rope)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), max_model_len=-1, skip_tokenizer_init=True)
    assert longest_of(model, Budget(trained, max(trained, LONGEST))) == length


def test_an_engine_has_room_for_what_the_model_takes_but_no_less_than_in_training(
    merged: Path,
) -> None:
    assert engine_settings(Served(merged), 0, Budget(500, 501))["max_model_len"] == -1
    small: Any = type("Small", (), {"longest": 500})()
    assert check_length(small, Budget(500, 600)) is small
    with pytest.raises(UserError, match="its memory is enough for 500 tokens, the training has"):
        check_length(small, Budget(501, 600))


def test_what_panjue_sets_itself_is_refused(merged: Path) -> None:
    own = engine_settings(Served(merged), 0, Budget(64, 64))
    assert own.keys() <= {*OWN_ARGUMENTS}, "they are refused before anything is written"
    assert "dtype" not in own, "a T4 has no bfloat16; vLLM takes float16 there"
    for name in ("seed", "tokenizer", "load_format", "trust_remote_code", "hf_token"):
        with pytest.raises(UserError, match=f"^engine: '{name}' is set by panjue$"):
            with_own({"dtype": "float32", name: "x"}, own)
