"""LoRA+, and the variants of LoRA that peft has: each trains and is served, or is refused."""

import errno
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter
from transformers import Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback, integration_utils

from panjue.finetune.libraries import check_trackers
from panjue.finetune.optimizers import lora_plus
from panjue.finetune.sft import main
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.serve.engine import engine_settings
from panjue.serve.merge import merge
from panjue.serve.trained import Served, served_model

ONE_STEP = [
    "trainer.max_steps=1",
    "trainer.eval_strategy='no'",
    "trainer.save_strategy='no'",
    "trainer.lr_scheduler_type=constant",
    "trainer.warmup_steps=0",
    "trainer.learning_rate=1e-3",
    "trainer.weight_decay=0",
    "classifier=false",
]


def sizes_of_b(adapter: Path) -> torch.Tensor:
    """Return the largest weight of each B, which starts as zeros."""
    weights = load_file(adapter / "adapter_model.safetensors")
    return torch.stack([value.abs().max() for key, value in weights.items() if "lora_B" in key])


def test_the_ratio_belongs_to_the_run(workshop: Path, tmp_path: Path) -> None:
    words = [f"run={tmp_path}/run", *ONE_STEP]
    main(workshop / "sft.yaml", [*words, "loraplus_lr_ratio=16"])
    for other in ([], ["loraplus_lr_ratio=4"]):
        with pytest.raises(UserError, match="loraplus_lr_ratio"):
            main(workshop / "sft.yaml", [*words, *other])


def test_lora_plus_has_two_groups_of_weights(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = get_peft_model(layers, LoraConfig(r=2, target_modules=["0", "1"]))
    rates = {"learning_rate": 1e-3, "weight_decay": 0.1}
    args = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True, **rates)
    groups = lora_plus(model, args, 16).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (1e-3, 0.1),
        (1.6e-2, 0.1),
    ]
    weights = dict(model.named_parameters())
    for group, letter in zip(groups, "AB", strict=True):
        expected = {id(weight) for key, weight in weights.items() if f"lora_{letter}" in key}
        assert {id(weight) for weight in group["params"]} == expected


@pytest.mark.parametrize("ratio", [None, 16])
def test_lora_plus_moves_b_by_its_own_rate(
    ratio: float | None, workshop: Path, tmp_path: Path
) -> None:
    """Adam's first step is the learning rate, whatever the gradient."""
    words = [] if ratio is None else [f"loraplus_lr_ratio={ratio}"]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *ONE_STEP, *words])
    expected = torch.full_like(sizes := sizes_of_b(tmp_path / "run/adapter"), 1e-3 * (ratio or 1))
    torch.testing.assert_close(sizes, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["method=full"], "loraplus_lr_ratio: goes with method=lora or qlora"),
        (["loraplus_lr_ratio=0.5"], "loraplus_lr_ratio: .*greater than or equal to 1"),
    ],
)
def test_what_does_not_go_with_lora_plus(
    words: list[str], complaint: str, workshop: Path, tmp_path: Path
) -> None:
    overrides = [f"run={tmp_path}/run", "dry_run=true", "loraplus_lr_ratio=16", *words]
    with pytest.raises(UserError, match=complaint):
        main(workshop / "sft.yaml", overrides)


def test_an_optimizer_that_groups_the_weights_itself_does_not_go_with_lora_plus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GaLore's and LOMO's, whose packages are not installed here."""
    given = torch.optim.SGD, {"lr": 1.0, "params": []}
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", lambda *_: given)
    args = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True, optim="adafactor")
    with pytest.raises(ValueError, match="loraplus_lr_ratio does not go with optim=adafactor,"):
        lora_plus(torch.nn.Linear(1, 1), args, 16)


def test_what_a_tracker_raises_is_said_in_one_line_and_the_training_resumes_without_it(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no key\nset one")

    words = [
        f"run={tmp_path}/run",
        *ONE_STEP,
        "trainer.save_strategy=steps",
        "trainer.save_steps=1",
    ]
    expected = (
        r"trainer\.report_to: TensorBoard: no key \(RuntimeError of its package\); set it up or "
        "leave it out, then run the same command to resume$"
    )
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "close", fail)
        with pytest.raises(UserError, match=expected):
            main(workshop / "sft.yaml", words)
    assert list((tmp_path / "run/checkpoints").glob("checkpoint-1"))
    main(workshop / "sft.yaml", [*words, "trainer.report_to=[]"])
    assert (tmp_path / "run/adapter").is_dir()


def test_a_full_disk_is_no_fault_of_the_tracker_that_notices_it(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TensorBoardCallback, "_init_summary_writer", fail)
    with pytest.raises(OSError, match="No space left"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *ONE_STEP])


def test_a_tracker_that_cannot_be_used_is_named_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in dir(integration_utils):
        if name.startswith("is_") and name.endswith("_available"):
            monkeypatch.setattr(integration_utils, name, lambda: False)
    check_trackers(["all", "none"])
    for name in integration_utils.INTEGRATION_TO_CALLBACK:
        with pytest.raises(UserError, match=f"report_to: {name} cannot be used here; (run|it) "):
            check_trackers(name)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"use_rslora": True}, None),
        ({"rank_pattern": {"q_proj": 24}}, None),
        ({"use_dora": True}, "adapter=lora: vLLM does not yet support DoRA; use adapter=merge"),
    ],
)
def test_variants_are_merged_and_what_vllm_cannot_load_unmerged_is_refused(
    words: dict[str, object], complaint: str | None, workshop: Path, tmp_path: Path
) -> None:
    settings = [f"lora.{key}={value}" for key, value in words.items()]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *ONE_STEP, *settings])
    adapter = tmp_path / "run/adapter"
    assert words.items() <= read_json(adapter / "adapter_config.json").items()
    merge(
        adapter, tmp_path / "run/merged"
    )  # it compares the outputs with those of base and adapter
    assert engine_settings(Served(tmp_path / "run/merged"), 0, 64)["enable_lora"] is False
    served = served_model(adapter, "lora")
    if complaint is None:
        rank = engine_settings(served, 0, 64)["max_lora_rank"]
        assert rank == (32 if "rank_pattern" in words else 8)
    else:
        with pytest.raises(UserError, match=complaint):
            engine_settings(served, 0, 64)
