"""How an engine starts: on which cards, with what in its environment, and why it does not.

The reason is one line; what can be known is said before anything is read or written.
"""

import os
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from ray._common.usage.usage_lib import usage_stats_enabled
from transformers import Qwen3Config
from vllm.config import ModelConfig
from vllm.usage.usage_lib import is_usage_stats_enabled
from vllm.v1.engine.async_llm import AsyncLLM

from panjue.finetune.trained import check_classes, read_trained
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.task import load_task
from panjue.serve.ask import LONGEST, Budget
from panjue.serve.engine import (
    OWN_ARGUMENTS,
    AsyncEngineArgs,
    check_engine,
    check_length,
    engine,
    engine_settings,
    longest_of,
    startup_errors,
)
from panjue.serve.job import Job
from panjue.serve.judge import load
from panjue.serve.merge import Served, served_model
from panjue.serve.server import serve
from panjue.serve.settings import (
    RESOURCES,
    GenerateConfig,
    environment,
    serve_settings,
)
from tests.machine import GOOD, Machine, nvidia_smi
from tests.opened import job_of as generate_job


def test_what_a_gpu_would_compile_at_the_start_is_off_unless_it_is_wanted() -> None:
    """Its compiler is on no machine that has only a driver; what is compiled finds ninja."""
    assert environment({})["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert {"VLLM_USE_FLASHINFER_SAMPLER", "PATH"} <= os.environ.keys()
    programs = str(Path(sys.executable).parent)
    assert programs in os.environ["PATH"].split(os.pathsep)
    wanted = environment({"VLLM_USE_FLASHINFER_SAMPLER": "1", "PATH": "/bin"})
    assert wanted["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert wanted["PATH"] == f"{programs}{os.pathsep}/bin"


def test_vllm_and_ray_report_nothing_unless_the_user_says_so() -> None:
    assert not is_usage_stats_enabled()
    assert not usage_stats_enabled()
    own = {"VLLM_NO_USAGE_STATS": "0", "RAY_USAGE_STATS_ENABLED": "1"}
    assert environment(own).items() >= own.items()


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


def test_the_engine_of_a_tiny_model_has_one_thread(
    merged: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise RuntimeError(f"its processes get {os.environ.get('OMP_NUM_THREADS')} threads")

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", start)
    with (
        pytest.raises(UserError, match="its processes get 1 threads"),
        engine(Served(merged), small["engine"], Budget(3072, 3072), seed=0),
    ):
        pass
    assert "OMP_NUM_THREADS" not in os.environ


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
    check_length(small, Budget(500, 600))
    with pytest.raises(UserError, match="its memory is enough for 500 tokens, but the training"):
        check_length(small, Budget(501, 600))


def test_what_panjue_sets_itself_cannot_be_set(merged: Path) -> None:
    own = engine_settings(Served(merged), 0, Budget(64, 64))
    assert own.keys() == {*OWN_ARGUMENTS}, "they are refused before anything is written"
    assert "dtype" not in own, "a T4 has no bfloat16; vLLM takes float16 there"
    assert set(RESOURCES) <= {field.name for field in fields(AsyncEngineArgs)}


def job_of(run: Path, test: Path, *words: str) -> Job:
    return generate_job(run, words)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("sampling.temprature=1", "sampling: Unexpected keyword argument 'temprature'"),
        ("sampling.seed=1", "set the top-level seed"),
        ("sampling.logprobs=50", "^sampling.logprobs: at most 20; or set engine.max_logprobs=50$"),
        ("sampling.prompt_logprobs=-1", "^sampling.prompt_logprobs: at most 20; or set engine.ma"),
        ("sampling.detokenize=false", "multiple values for keyword argument 'detokenize'"),
        ("engine.dtyp=float32", "engine: no setting 'dtyp'; did you mean 'dtype'"),
        ("task=drop", "was trained for 'judgment'; leave out `task`"),
        ("samples=2", "samples: 'judgment' uses one reply per question; set samples=0"),
        ("replicas=2", "replicas: needs ray=auto"),
        ("answers=a/b", "^answers=a/b: String should match"),
        ("answers=.hidden", r"^answers=\.hidden: String should match"),
    ],
)
def test_bad_settings_end_in_one_line(
    word: str, complaint: str, trained: Path, workshop: Path
) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        job_of(trained, workshop / "demo/test.jsonl", word)
    assert "\n" not in str(error.value)


def test_settings_of_sampling_that_go_with_others_are_taken(trained: Path, workshop: Path) -> None:
    words = ["sampling.min_tokens=20", "sampling.logprobs=50", "engine.max_logprobs=50"]
    job = job_of(trained, workshop / "demo/test.jsonl", *words)
    assert job.passes == [{"min_tokens": 20, "logprobs": 50}]


def test_missing_files_and_packages_are_named(
    trained: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = workshop / "demo/test.jsonl"
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match="is a base model, without a training; train on it first"):
        job_of(tmp_path / "base", test)
    with pytest.raises(UserError, match="nothing trained is there; run `panjue sft` first"):
        job_of(tmp_path, test)
    with pytest.raises(UserError, match="leave out `ray` or `endpoint`"):
        job_of(trained, test, "ray=auto", "endpoint=http://127.0.0.1:1/v1#x")
    monkeypatch.setattr("panjue.serve.settings.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^ray: is not installed; "):
        job_of(trained, test, "ray=auto")


def copy_with(trained: Path, folder: Path, **changed: str) -> Path:
    """Return a copy of a run whose adapter has another record."""
    shutil.copytree(trained / "adapter", folder / "adapter")
    RunRecord.read(folder / "adapter").model_copy(update=changed).write(folder / "adapter")
    return folder


def test_a_training_of_another_prompt_or_other_labels_is_refused(
    trained: Path, workshop: Path, tmp_path: Path
) -> None:
    test = workshop / "demo/test.jsonl"
    with pytest.raises(UserError, match="its prompt has changed since training"):
        job_of(copy_with(trained, tmp_path / "prompt", prompt_sha256="0"), test)
    with pytest.raises(UserError, match=r"its labels.json has changed since training"):
        job_of(copy_with(trained, tmp_path / "labels", labels_sha256="0"), test)


def test_a_class_that_the_task_no_longer_has_is_named() -> None:
    labels = Labels(counts={"penalty": {"有期徒刑一百年": 3}})
    with pytest.raises(
        UserError, match=r"^runs/mine: the task has no penalty '有期徒刑一百年' any"
    ):
        check_classes(load_task("judgment"), labels, Path("runs/mine"))


def test_a_base_that_has_moved_is_found_where_it_is_said_to_be(
    trained: Path, workshop: Path, tmp_path: Path
) -> None:
    adapter = copy_with(trained, tmp_path, base="/no/where") / "adapter"
    with pytest.raises(
        UserError, match="name it with base=FOLDER, of `merge` and `bundle` --base FOLDER"
    ):
        served_model(read_trained(adapter), "lora")
    base = workshop / "base/model"
    assert served_model(read_trained(adapter), "lora", str(base)) == Served(base, adapter)


CONFIGS = sorted((Path(__file__).parents[2] / "finetune/configs").glob("*.yaml"))


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.name != "fsdp2.yaml"])
def test_every_shipped_config_has_settings_that_the_engine_knows(path: Path) -> None:
    check_engine(load_section(GenerateConfig, path, "generate").engine)


@pytest.mark.skipif(torch.version.cuda is not None, reason="the torch here is for GPUs")
def test_a_server_does_not_start_beside_a_gpu_that_torch_cannot_use(
    trained: Path, machine: Machine
) -> None:
    machine({**GOOD, "nvidia-smi": nvidia_smi()})
    with pytest.raises(UserError, match=r"^GPU: torch cannot use the NVIDIA T4 "):
        serve(*serve_settings(trained, ["answer=model"]))
    with pytest.raises(UserError, match=r"^GPU: torch cannot use the NVIDIA T4 "), load(trained):
        pass
