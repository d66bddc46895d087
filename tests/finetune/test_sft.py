"""What a training writes, says and refuses."""

import json
import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from panjue.eval.runs import list_runs
from panjue.finetune.checkpoints import disk_errors_named, newest_complete
from panjue.finetune.memory import moment_bytes
from panjue.finetune.settings import SftConfig, sft_settings
from panjue.finetune.trained import open_trained
from panjue.finetune.trainer import ReplyTrainer
from panjue.finetune.training_log import print_example
from panjue.prompts.labels import load_labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, write_json
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.reader import Reader, is_held_out
from panjue.prompts.task import load_task

from .conftest import EXACT, UNEVALUATED, adapter_bytes, logged, main

FIELDS = {"charges", "articles", "penalty"}
TASK = load_task("judgment")
UNFINISHED = {"examples": None, "labels_sha256": None}


def test_a_run_leaves_everything_and_learns(trained: Path, workshop: Path) -> None:
    for name in ("adapter_model.safetensors", "labels.json", "manifest.json", "classifier.npz"):
        assert (trained / "adapter" / name).is_file()
    assert any((trained / "tensorboard").rglob("events.out.tfevents*"))
    curve = [entry["loss"] for entry in logged(trained, "loss")]
    assert len(curve) == 12
    assert sum(curve[-3:]) < sum(curve[:3])
    opened = open_trained(trained)
    advisor = opened.advisor(TASK)
    assert advisor
    example = next(Reader(TASK).read(workshop / "demo/test.jsonl"))
    assert [set(item) for item in advisor.classifier.probabilities(example)] == [FIELDS] * len(
        example.names
    )
    settings = load_section(SftConfig, trained / "config.yaml", "sft")
    assert settings.lora == {"r": 8, "target_modules": "all-linear"}
    assert opened.record.base == f"{workshop}/base/model"
    assert not RunRecord.read(trained).difference(opened.record.model_copy(update=UNFINISHED))


def test_labels_come_from_what_is_trained_on_and_not_from_the_held_out_tenth(
    trained: Path, workshop: Path
) -> None:
    everything = TASK.ask.labels(Reader(TASK).read(workshop / "demo/train.jsonl"))
    seen = load_labels(trained / "adapter/labels.json")
    assert seen.counts.keys() == FIELDS
    assert sum(seen.counts["charges"].values()) < sum(everything.counts["charges"].values())


def test_max_steps_is_a_cap_on_the_epochs(workshop: Path, tmp_path: Path, capsys: Any) -> None:
    cases = ["max_steps=500", "max_steps=500 num_train_epochs=1", "max_steps=2 num_train_epochs=1"]
    planned = []
    for case in cases:
        words = [f"trainer.{word}" for word in case.split()]
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true", *words])
        planned += re.findall(r"^steps +(\d+)", capsys.readouterr().out, re.MULTILINE)
    read = list(Reader(TASK).read(workshop / "demo/train.jsonl"))
    trained_on = sum(not is_held_out(example) for example in read)
    epoch = math.ceil(trained_on / 8)
    assert planned == ["500", str(epoch), "2"], "a step has 8 cases"


def test_the_last_lines_have_the_loss_of_what_was_kept_and_the_next_command(
    workshop: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = [f"run={run}", "trainer.max_steps=2", "trainer.eval_steps=1", "seed=1"]
    main(workshop / "sft.yaml", words)  # no other has this seed: it fits a classifier of its own
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.match("./4 |fitting", line)] == [
        "1/4 reading and tokenizing the cases",
        "fitting the text classifier on all cases that are not held out (at most 12,000 of a file)",
        "2/4 loading the base model",
        "3/4 training the adapter",
        "4/4 saving",
    ]
    assert (run / "checkpoints/checkpoint-1/complete").exists(), "what is evaluated is saved"
    best = min(entry["eval_loss"] for entry in logged(run, "eval_loss"))
    task = load_task("judgment")
    held_out = sum(1 for _ in Reader(task, held_out=True).read(workshop / "demo/train.jsonl"))
    assert lines[-3:] == [
        f"written: {run}/adapter (loss {best:.4f} on {held_out} held-out cases)",
        f"next: panjue generate {run} TEST",
        f"curve: {Path(sys.executable).with_name('tensorboard')} --logdir {run}/tensorboard"
        " --samples_per_plugin scalars=0",
    ]
    assert any(line.endswith("linear models") or "linear models  " in line for line in lines)


def test_a_finished_run_is_left_alone_and_other_settings_are_refused_by_name(
    trained: Path, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "adapter/adapter_model.safetensors").stat().st_mtime_ns
    for config in (workshop / "sft.yaml", trained / "config.yaml"):  # make takes the second one
        main(config, [f"run={trained}"])
        assert "already trained" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"seed: 0 -> 1"):
        main(workshop / "sft.yaml", ["seed=1"])
    assert (trained / "adapter/adapter_model.safetensors").stat().st_mtime_ns == before


def test_resume_takes_the_newest_complete_checkpoint_and_gives_the_same_weights(
    trained: Path, workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-12/complete").unlink()
    record = read_json(run / "manifest.json")
    record["trainer"] |= {"logging_steps": 1, "save_total_limit": 2}  # as older code wrote
    write_json(run / "manifest.json", record)
    speed = ["per_device_eval_batch_size=3", "logging_steps=2", "gradient_checkpointing=true"]
    speed.append("per_device_train_batch_size=8")  # as many as a CPU takes by default
    main(workshop / "sft.yaml", [f"run={run}", *(f"trainer.{word}" for word in speed)])
    assert "checkpoint-6" in capsys.readouterr().out
    assert adapter_bytes(run) == adapter_bytes(trained)
    counts = [entry["num_tokens"] for entry in logged(run, "num_tokens")]
    assert counts == sorted(counts)
    assert counts == [entry["num_tokens"] for entry in logged(trained, "num_tokens")]


def test_a_resumed_run_may_take_another_number_of_examples_at_once(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU of another size. Sums of gradients round in another way then."""
    run, weights = tmp_path / "run", "adapter_model.safetensors"
    words = [f"run={run}", *EXACT, "trainer.max_steps=4", "trainer.save_steps=2"]
    words.append("trainer.eval_steps=2")
    main(workshop / "sft.yaml", [*words, "trainer.per_device_train_batch_size=8"])
    whole = load_file(run / "adapter" / weights)
    tokens = [entry["num_tokens"] for entry in logged(run, "num_tokens")]
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-4/complete").unlink()
    main(workshop / "sft.yaml", [*words, "trainer.per_device_train_batch_size=2"])
    out = capsys.readouterr().out
    assert "resuming from" in out
    assert "checkpoint-2" in out
    resumed = load_file(run / "adapter" / weights)
    torch.testing.assert_close(resumed, whole, rtol=1e-3, atol=1e-5)
    assert [entry["num_tokens"] for entry in logged(run, "num_tokens")] == tokens
    resumed_from = load_file(run / "checkpoints/checkpoint-2" / weights)
    with pytest.raises(AssertionError):  # two steps change more than the tolerance
        torch.testing.assert_close(resumed_from, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spent", [False, True], ids=["at the last step", "of patience"])
def test_a_training_that_is_over_is_only_saved(
    trained: Path, workshop: Path, tmp_path: Path, spent: bool
) -> None:
    run, config = tmp_path / "run", workshop / "sft.yaml"
    words = [f"run={run}"]
    if spent:  # so low a rate that no evaluation is better than the first
        words += ["trainer.learning_rate=1.0e-30", "trainer.eval_steps=2", "trainer.save_steps=2"]
        words += ["trainer.max_steps=40", "patience=2"]
        main(config, words)
        newest = newest_complete(run / "checkpoints")
        assert newest == run / "checkpoints/checkpoint-6", "the first, and two that are no better"
    else:
        shutil.copytree(trained, run)
    before = adapter_bytes(run)
    log = (run / "log.jsonl").read_bytes()
    shutil.rmtree(run / "adapter")
    main(config, words)
    assert adapter_bytes(run) == before
    assert (run / "log.jsonl").read_bytes() == log, "not a step more"


def test_what_ends_before_the_first_step_leaves_nothing_in_the_way(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in ("TrainingRun.claim", "TrainingRun.classifier", "ReplyTrainer.train_or_resume"):
        with monkeypatch.context() as patch:
            patch.setattr(f"panjue.finetune.sft.{moment}", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                main(workshop / "sft.yaml", [f"run={tmp_path}/run", *UNEVALUATED])
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *UNEVALUATED, "lora.r=4"])
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_dry_run_shows_the_plan_and_trains_nothing(
    workshop: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.finetune.training_log.gpu_memory", lambda: 24 * 2**30)
    monkeypatch.setattr("panjue.finetune.training_run.fit", Mock(side_effect=AssertionError))
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true", "seed=2"])
    said = capsys.readouterr().out
    for word in ("examples", "refused", "shortened", "tokens", "weights", "steps", "[loss]"):
        assert word in said
    assert re.search(r"^time +about \d+ s, from a step timed just now$", said, re.MULTILINE)
    assert "the text classifier is not fitted; prompts show the commonest labels" in said
    assert re.search(r"罪 75%(?: \| \S+罪 20%)?; ", said), "opinions as long as real ones"
    assert "3/4" not in said
    assert "without activations; the GPU has 24.00 GiB" in said
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not (tmp_path / "run/adapter").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rows"]
    kept = tmp_path / "run/checkpoints/checkpoint-1"
    kept.mkdir(parents=True)
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true", "seed=2"])
    assert kept.is_dir()
    shutil.rmtree(kept.parent)
    with pytest.raises(UserError, match="has no run folders"):
        list_runs(tmp_path)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [("adamw_torch_fused", 8), ("paged_adamw_8bit", 2), ("adamw_torch_4bit", 1), ("sgd", None)],
)
def test_the_plan_counts_the_moments_of_adamw_alone(optimizer: str, size: int | None) -> None:
    assert moment_bytes(optimizer) == size


def test_a_checkpoint_without_a_record_is_somebodys_work(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/checkpoint-6").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds another run \(there is no record"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *UNEVALUATED])


@pytest.mark.usefixtures("three_threads")
def test_a_tiny_model_is_trained_by_two_threads_of_three(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    compute_loss = ReplyTrainer.compute_loss

    def counted(*args: Any, **settings: Any) -> torch.Tensor:
        counts.append(torch.get_num_threads())
        return compute_loss(*args, **settings)

    monkeypatch.setattr(ReplyTrainer, "compute_loss", counted)
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *UNEVALUATED])
    assert set(counts) == {2}
    assert torch.get_num_threads() == 3, "the next model of this process has them again"


def test_qlora_takes_real_steps_on_four_bits(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nf4 = "load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_compute_dtype: float32"
    bits = f"quantization={{{nf4}}}"
    steps = ["trainer.max_steps=2", "trainer.eval_steps=2", "trainer.save_steps=2"]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", "method=qlora", bits, *steps])
    said = "this loss is of the base in four bits; answers come from it as it is"
    assert said in capsys.readouterr().out.splitlines()
    assert all(0 < entry["loss"] < 100 for entry in logged(tmp_path / "run", "loss"))
    assert logged(tmp_path / "run", "eval_loss")
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
    checkpoint = tmp_path / "run/checkpoints/checkpoint-2"
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    weights = load_file(checkpoint / "adapter_model.safetensors").values()
    trained = [*weights, *(state["exp_avg"] for state in moments.values())]
    assert {tensor.dtype for tensor in trained} == {torch.float32}, "trl casts them to bfloat16"


def test_a_moved_run_keeps_its_best_checkpoint_or_refuses(
    trained: Path, workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "adapter")
    state = run / "checkpoints/checkpoint-12/trainer_state.json"
    best = {"best_model_checkpoint": "/elsewhere/checkpoints/checkpoint-6", "best_metric": 0.0}
    state.write_text(json.dumps({**read_json(state), **best}), "utf-8")
    main(workshop / "sft.yaml", [f"run={run}"])
    sixth = run / "checkpoints/checkpoint-6"
    assert adapter_bytes(run) == (sixth / "adapter_model.safetensors").read_bytes()
    for folder in (run / "adapter", sixth):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="checkpoint-6: the best checkpoint is missing"):
        main(workshop / "sft.yaml", [f"run={run}"])


@pytest.mark.parametrize("save", [torch.save, save_file], ids=["torch", "safetensors"])
def test_a_full_disk_is_named(save: Callable[..., None], tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        with (
            pytest.raises(OSError, match=r"File too large|No space left") as error,
            disk_errors_named(tmp_path),
        ):
            save({"weight": torch.zeros(100_000)}, tmp_path / "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert error.value.filename == str(tmp_path)
    with pytest.raises(RuntimeError, match="another"), disk_errors_named(tmp_path):
        raise RuntimeError("another")


def test_an_empty_file_is_called_so(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text("\n// a remark\n\n", "utf-8")
    with pytest.raises(UserError, match=r"^train: .*cases\.jsonl is empty$"):
        sft_settings(workshop / "sft.yaml", [f"train={tmp_path}/cases.jsonl"])


def test_without_held_out_cases_nothing_is_evaluated(workshop: Path, tmp_path: Path) -> None:
    lines = (workshop / "demo/train.jsonl").read_text("utf-8").splitlines()
    examples = Reader(TASK).read(workshop / "demo/train.jsonl")
    pairs = zip(lines, examples, strict=True)
    kept = [line for line, example in pairs if not is_held_out(example)]
    (tmp_path / "few.jsonl").write_text("\n".join(kept[:5]), "utf-8")
    words = ["trainer.max_steps=1", "trainer.eval_steps=1", "trainer.save_steps=1"]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", f"train={tmp_path}/few.jsonl", *words])
    assert adapter_bytes(tmp_path / "run")
    assert not logged(tmp_path / "run", "eval_loss")


def test_a_test_file_is_nothing_to_learn_from(workshop: Path, tmp_path: Path) -> None:
    case = json.loads((workshop / "demo/train.jsonl").read_text("utf-8").splitlines()[0])
    del case["outcomes"]
    (tmp_path / "test.jsonl").write_text(json.dumps(case), "utf-8")
    with pytest.raises(UserError, match="no answer to learn from") as error:
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", f"train={tmp_path}/test.jsonl"])
    assert "but id, fact, defendants; use a training file, or say" in str(error.value)
    assert str(error.value).endswith("columns.outcomes=COLUMN")


def test_own_columns_train_the_same_and_a_try_is_no_whole_training(
    workshop: Path, tmp_path: Path
) -> None:
    own = {"id": "编号", "fact": "content", "outcomes": "判决"}
    lines = (workshop / "demo/train.jsonl").read_text("utf-8").splitlines()
    rows = [{own.get(key, key): v for key, v in json.loads(line).items()} for line in lines]
    (tmp_path / "own.jsonl").write_text("\n".join(map(dump, rows)), "utf-8")
    columns = [f"columns.{name}={given}" for name, given in own.items()]
    of_own = [f"train={tmp_path}/own.jsonl", *columns, "limit=8", *UNEVALUATED]
    main(workshop / "sft.yaml", [f"run={tmp_path}/own", *of_own])
    main(workshop / "sft.yaml", [f"run={tmp_path}/plain", "limit=8", *UNEVALUATED])
    assert adapter_bytes(tmp_path / "own") == adapter_bytes(tmp_path / "plain")
    record = RunRecord.read(tmp_path / "own/adapter")
    assert (record.columns, record.limit, record.examples) == (own, 8, 8)
    with pytest.raises(UserError, match=r"holds another run \(limit: 8 -> null\)"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/plain", *UNEVALUATED])


def test_an_example_is_printed_as_the_model_sees_it(merged: Path) -> None:
    tokenizer, printed = load_tokenizer(merged), StringIO()
    ids = tokenizer("时间:100: [b]他:car:")["input_ids"]
    row = {"input_ids": ids, "labels": ids}
    print_example(Console(file=printed, soft_wrap=True), row, tokenizer)
    assert printed.getvalue() == "[loss] 时间:100: [b]他:car:\n"
