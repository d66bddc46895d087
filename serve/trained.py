"""The folders of a training result that an engine loads."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from panjue.prompts.model import VLLM_RANKS, lora_rank, model_folder, model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.run import RunRecord


class Served(NamedTuple):
    """Folder of the model to load, and of the adapter to load on it, if any."""

    model: Path
    adapter: Path | None = None

    @property
    def lora_rank(self) -> int:
        """Return the adapter's rank, rounded up to one that vLLM supports; 0 without adapter."""
        if self.adapter is None:
            return 0
        if rank := lora_rank(self.adapter):
            return rank
        largest = VLLM_RANKS[-1]
        raise UserError(f"adapter: vLLM supports ranks up to {largest} only; use adapter=merge")


def served_model(trained: Path, adapter: str, base: str | None = None) -> Served:
    """Return the folders to load.

    Args:
        trained: Folder of a training result: an adapter or a full model.
        adapter: `merge`, `lora` or `none`; see `EngineConfig.adapter`.
        base: Folder or hub name of the base model, if it has moved.
    """
    record = RunRecord.read(trained)
    if not (trained / "adapter_config.json").exists():
        if adapter == "lora":
            raise UserError(f"{trained}: is a full model without an adapter; use adapter=merge")
        return Served(check_base(trained, record, base) if adapter == "none" else trained)
    if adapter == "merge":
        merged = trained.with_name("merged")
        if not is_merged(merged_record(trained), merged):
            from panjue.serve.merge import merge  # it imports peft, which takes seconds

            merge(trained, merged, base)
        return Served(merged)
    return Served(check_base(trained, record, base), trained if adapter == "lora" else None)


def merged_record(adapter: Path) -> RunRecord:
    """Return the record that a merge of an adapter has."""
    digest = model_sha256(adapter)
    return RunRecord.read(adapter).model_copy(update={"adapter_sha256": digest})


def is_merged(record: RunRecord, out: Path) -> bool:
    """Say whether `out` is the finished merge with this record.

    While another process replaces `out`, it has no record; `merge` waits for that process.
    """
    with suppress(UserError):
        return RunRecord.read(out) == record
    return False


def check_base(adapter: Path, record: RunRecord, base: str | None = None) -> Path:
    """Return the folder of the base that `adapter` was trained on; `base` if it has moved."""
    name = base or record.base
    try:
        folder = model_folder(name)
    except UserError as error:
        moved = "" if base else f" (the base of {adapter}; if it has moved, say base=FOLDER)"
        raise UserError(f"{error}{moved}") from None
    if model_sha256(folder) != record.base_sha256:
        raise UserError(
            f"{adapter}: was trained on another base than {name} is now; "
            "set base=FOLDER to that base, or train again"
        )
    return folder
