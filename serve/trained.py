"""The folders of a training result that an engine loads."""

from pathlib import Path
from typing import NamedTuple

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.serve.merge import check_base, merge


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
        rank = read_json(self.adapter / "adapter_config.json")["r"]
        allowed = [size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank]
        if not allowed:
            raise UserError(
                f"adapter: its rank is {rank}, vLLM supports up to 512; use adapter=merge"
            )
        return allowed[0]


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
        return Served(merge(trained, trained.with_name("merged"), base))
    return Served(check_base(trained, manifest, base), trained if adapter == "lora" else None)
