"""Curves for TensorBoard in which each step of a training appears once."""

from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback


class Curves(TensorBoardCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Writes the log. A training that resumes takes back the steps that it trains again."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begin a new file; TensorBoard then drops steps after the checkpoint from older files."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # may be missing

        if state.is_world_process_zero:
            self.tb_writer = SummaryWriter(self.logging_dir, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **others)
