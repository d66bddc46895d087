"""The folders of a training result that an engine loads."""

from pathlib import Path
from typing import Any, NamedTuple

from panjue.prompts.model import VLLM_RANKS, lora_rank, model_folder, model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json


class Served(NamedTuple):
    """Folder of the model to load, and of the adapter to load on it, if any."""

    model: Path
    adapter: Path | None = None

    @property
    def lora_rank(self) -> int:
        """Return the adapter's rank, rounded up to one that vLLM supports; 0 without adapter.

        Raises:
            UserError: vLLM supports no rank as large.
        """
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
    manifest = read_json(trained / "manifest.json")
    if not (trained / "adapter_config.json").exists():
        if adapter == "lora":
            raise UserError(f"{trained}: is a full model without an adapter; use adapter=merge")
        return Served(check_base(trained, manifest, base) if adapter == "none" else trained)
    if adapter == "merge":
        merged = trained.with_name("merged")
        if not is_merged(merged_manifest(trained, merged), merged):
            merge_now(trained, merged, base)
        return Served(merged)
    return Served(check_base(trained, manifest, base), trained if adapter == "lora" else None)


def merge_now(adapter: Path, out: Path, base: str | None) -> None:
    """Merge an adapter; see `panjue.serve.merge.merge`."""
    from panjue.serve.merge import merge  # it imports peft, which takes seconds

    merge(adapter, out, base)


def merged_manifest(adapter: Path, out: Path) -> dict[str, Any]:
    """Return the manifest that the merge of an adapter into `out` has, or gets."""
    digest = model_sha256(adapter)
    return {**read_json(adapter / "manifest.json"), "adapter_sha256": digest}


def is_merged(manifest: dict[str, Any], out: Path) -> bool:
    """Say whether `out` is the finished merge with this manifest."""
    return existing_manifest(out) == manifest


def existing_manifest(out: Path) -> dict[str, Any]:
    """Return the manifest in `out`; empty if there is none, or while another process replaces it.

    `merge` waits for that process, and then finds its merge.
    """
    try:
        manifest: dict[str, Any] = read_json(out / "manifest.json")
    except UserError:
        return {}
    return manifest


def check_base(adapter: Path, manifest: dict[str, str], base: str | None = None) -> Path:
    """Return the folder of the base that `adapter` was trained on; `base` if it has moved.

    Raises:
        UserError: The base is missing or has other weights.
    """
    name = base or manifest["base"]
    try:
        folder = model_folder(name)
    except UserError as error:
        moved = "" if base else f" (the base of {adapter}; if it has moved, say base=FOLDER)"
        raise UserError(f"{error}{moved}") from None
    if model_sha256(folder) != manifest["base_sha256"]:
        raise UserError(
            f"{adapter}: was trained on another base than {name} is now; "
            "set base=FOLDER to that base, or train again"
        )
    return folder
