"""What depends on GPUs, tried on a machine without one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from trl import SFTConfig

from panjue.finetune.library_settings import precision, shares, trainer_config
from panjue.finetune.model import base_dtype, load_base
from panjue.finetune.trainer import ReplyTrainer, step_size
from panjue.prompts.plumbing.errors import UserError

from .conftest import UNEVALUATED, a_config, main


@pytest.mark.parametrize(
    ("capability", "given", "dtype"),
    [
        (9, {}, torch.bfloat16),
        (8, {"fp16": True}, torch.float16),
        (7, {}, torch.float16),  # T4, V100: torch only emulates bfloat16
        (7, {"bf16": True}, torch.bfloat16),
        (7, {"fp16": False}, torch.float32),
        (9, {"bf16": False}, torch.float32),
    ],
)
def test_the_gpu_decides_the_precision(
    capability: int, given: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = SimpleNamespace(major=capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    found = precision(given)
    assert found == {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    args = SimpleNamespace(**found)
    assert base_dtype(a_config(), args) == dtype
    assert base_dtype(a_config(method="full"), args) == torch.float32


def test_one_process_uses_one_gpu_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = SFTConfig.__post_init__

    def seeing_two(self: Any) -> None:  # as transformers/training_args.py:1917 does
        prepare(self)
        self._n_gpu = 2

    monkeypatch.setattr(SFTConfig, "__post_init__", seeing_two)
    args = trainer_config(a_config(batch=8))
    assert (args.n_gpu, step_size(args)) == (1, 8)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_batches_are_copied_while_the_gpu_computes(is_pinned: bool) -> None:
    args = trainer_config(a_config(trainer={"dataloader_pin_memory": is_pinned}))
    assert args.accelerator_config.non_blocking == is_pinned


@pytest.mark.parametrize("processes", [1, 4, 8])
@pytest.mark.parametrize("at_once", [1, 3, 16, None])
def test_a_step_has_as_many_examples_with_any_number_of_processes(
    processes: int, at_once: int | None
) -> None:
    trainer = {"per_device_train_batch_size": at_once} if at_once else {}
    size, times = shares(a_config(batch=16, trainer=trainer), processes)
    assert size * times * processes == 16
    assert size <= (at_once or 16)


@pytest.mark.parametrize(("batch", "other"), [(16, 15), (2, 3)])
def test_a_batch_that_cannot_be_divided_is_refused(batch: int, other: int) -> None:
    with pytest.raises(UserError, match=f"^batch: {batch} .* 3 processes; set batch={other}$"):
        shares(a_config(batch=batch), 3)


def test_a_base_is_loaded_straight_to_its_device(workshop: Path) -> None:
    model = load_base(workshop / "base/model", torch.float32, device=torch.device("meta"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_a_full_gpu_is_one_line_and_no_other_error_of_cuda_is_a_setting(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"run={tmp_path}/run", *UNEVALUATED]
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    for place in ("trainer.ReplyTrainer.compute_loss", "model.load_base"):
        with monkeypatch.context() as patch:
            patch.setattr(f"panjue.finetune.{place}", Mock(side_effect=full))
            for at_once, way_out in ((1, ""), (4, "trainer.per_device_train_batch_size=1, ")):
                message = rf"^GPU: CUDA out of memory.* set {way_out}method=qlora, a lower max_tok"
                with pytest.raises(UserError, match=message):
                    main(
                        workshop / "sft.yaml",
                        [*words, f"trainer.per_device_train_batch_size={at_once}"],
                    )
    error = torch.AcceleratorError("CUDA error: device-side assert triggered", 710)
    monkeypatch.setattr(ReplyTrainer, "add_callback", Mock(side_effect=error))
    with pytest.raises(torch.AcceleratorError):
        main(workshop / "sft.yaml", words)


def test_all_weights_in_float32_are_evaluated_as_they_are_trained(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, seen = ReplyTrainer.evaluation_loop, list[bool]()

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        def note(*_: Any) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

        with self.model.get_output_embeddings().register_forward_hook(note):
            return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(ReplyTrainer, "evaluation_loop", watched)
    words = ["trainer.max_steps=1", "trainer.eval_steps=1", "trainer.save_steps=1"]
    words += [f"run={tmp_path}/run", "method=full", "trainer.bf16=true"]
    main(workshop / "sft.yaml", words)
    assert seen
    assert all(seen)


def test_checkpointed_activations_as_on_a_gpu_give_the_same_weights(
    workshop: Path, tmp_path: Path
) -> None:
    """A GPU computes activations again in the backward pass; the base there is frozen."""
    words = [*UNEVALUATED, "trainer.packing=true", "batch=2"]
    found = []
    for use in ("true", "false"):
        run = tmp_path / use
        settings = [f"run={run}", f"trainer.gradient_checkpointing={use}", *words]
        main(workshop / "sft.yaml", settings)
        found.append(load_file(run / "adapter/adapter_model.safetensors"))
    once, again = found
    assert any(weight.any() for name, weight in once.items() if "lora_B" in name), "it has learnt"
    torch.testing.assert_close(once, again, rtol=1e-3, atol=1e-6)
