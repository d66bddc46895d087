"""The adapters that a training keeps for `panjue choose`: two beside that of the lowest loss."""

import shutil
from pathlib import Path

import pytest
from transformers import TrainerState

from panjue.finetune.checkpoints import mark_complete
from panjue.finetune.kept import FILES, keep_adapters
from panjue.finetune.trained import open_trained
from panjue.prompts.cli_choose import adapters_of
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.plumbing.run import kept_adapters, weights_folder

from .conftest import adapter_bytes, logged, main

OFTEN = ("trainer.max_steps=5", "trainer.eval_steps=1", "trainer.save_steps=1", "patience=9")
WEIGHTS = "adapter_model.safetensors"


def steps_wanted(run: Path) -> list[int]:
    """Return the last two evaluated steps that do not have the lowest loss."""
    losses = {row["step"]: row["eval_loss"] for row in logged(run, "eval_loss")}
    lowest = min(losses, key=lambda step: (losses[step], step))
    return [step for step in losses if step != lowest][-2:]


def test_three_adapters_are_kept_and_each_is_a_result_without_an_optimizer(
    workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    main(workshop / "sft.yaml", [f"run={run}", "keep=3", *OFTEN])
    kept = kept_adapters(run)
    assert list(kept) == steps_wanted(run)
    for step, place in kept.items():
        assert f"these weights of step {step}." in (place / "README.md").read_text("utf-8")
        assert RunRecord.read(place) == open_trained(run).record
        names = {path.name for path in place.iterdir()}
        assert names <= {path.name for path in (run / "adapter").iterdir()}
        assert {WEIGHTS, "labels.json", "classifier.npz"} <= names
    others = {(place / WEIGHTS).read_bytes() for place in kept.values()}
    assert len({*others, adapter_bytes(run)}) == 3
    before = {step: (place / WEIGHTS).read_bytes() for step, place in kept.items()}

    # Killed before the result was complete.
    shutil.rmtree(run / "adapter")
    [*_, last] = kept
    shutil.rmtree(kept[last])
    write_json(run / "chosen.json", {})
    main(workshop / "sft.yaml", [f"run={run}", "keep=3", *OFTEN])
    after = {step: (place / WEIGHTS).read_bytes() for step, place in kept_adapters(run).items()}
    assert after == before
    assert all(weights_folder(place) for place in kept.values())
    assert not (run / "chosen.json").exists(), "nothing was chosen of this result"


def test_where_the_last_step_is_the_result_it_has_its_own_name(
    workshop: Path, tmp_path: Path
) -> None:
    """The losses rise, so another step has the lowest one."""
    run = tmp_path / "run"
    last = ("trainer.load_best_model_at_end=false", "trainer.learning_rate=0.1")
    main(workshop / "sft.yaml", [f"run={run}", "keep=3", *OFTEN, *last])
    losses = {row["step"]: row["eval_loss"] for row in logged(run, "eval_loss")}
    assert min(losses, key=losses.__getitem__) != 5
    adapters = adapters_of(run)
    found = {adapter.trained.folder.name: (adapter.step, adapter.loss) for adapter in adapters}
    assert found == {
        "adapter": (5, losses[5]),
        "step-3": (3, losses[3]),
        "step-4": (4, losses[4]),
    }
    assert adapters[0].loss == min(losses[step] for step in (3, 4, 5)), "of the lowest loss first"


def test_a_kept_adapter_survives_a_kill_while_it_is_replaced(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is gone by then, so nothing could make it again."""
    run = tmp_path / "run"
    words = [f"run={run}", "keep=3", "trainer.save_total_limit=1", *OFTEN]
    plain = Path.rename

    class Killed(BaseException):
        """Ends a training as SIGKILL does."""

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp") and target.parent.name == "kept" and target in taken:
            raise Killed
        taken.add(self)
        return plain(self, target)

    taken: set[Path] = set()
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        main(workshop / "sft.yaml", words)
    monkeypatch.undo()
    assert len([*(run / "kept").glob(".step-*.old")]) == 1
    main(workshop / "sft.yaml", words)
    assert list(kept_adapters(run)) == steps_wanted(run)
    assert all(weights_folder(place) for place in kept_adapters(run).values())
    assert sorted(path.name for path in (run / "kept").iterdir()) == sorted(
        f"step-{step}" for step in steps_wanted(run)
    )


@pytest.mark.parametrize("keep", range(2, 8))
def test_as_many_are_kept_as_wanted_and_the_last_ones(keep: int, tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"task": "", "prompt_sha256": "", "seed": 0})
    state = TrainerState(log_history=[], best_global_step=3)
    for step in range(1, 7):
        place = tmp_path / f"checkpoints/checkpoint-{step}"
        place.mkdir(parents=True)
        for name in FILES:
            (place / name).write_text(str(step))
        mark_complete(place)
        state.log_history.append({"step": step, "eval_loss": 1.0})
        keep_adapters(tmp_path, keep, state, result=3)
    others = [step for step in range(1, 7) if step != 3]
    assert [step for step in kept_adapters(tmp_path) if step != 3] == others[-(keep - 1) :]


def test_one_adapter_is_kept_where_nothing_is_said(trained: Path) -> None:
    assert not (trained / "kept").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["method=full", "lora={}"], "keep: method=full trains no adapter; set keep=1"),
        (["trainer.eval_strategy=no"], "keep: needs equal trainer.eval_strategy and save_strategy"),
        (["trainer.save_strategy=epoch"], "keep: needs equal"),
    ],
)
def test_several_adapters_need_losses(
    words: list[str], problem: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", "keep=3", *words])
