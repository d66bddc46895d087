"""What an engine starts of a training result."""

from pathlib import Path
from typing import NamedTuple

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.serve.merge import check_base, merge


class Served(NamedTuple):
    """The folder of the model that is started, and that of the adapter beside it, if any."""

    model: Path
    adapter: Path | None = None

    @property
    def lora_rank(self) -> int:
        """Return the rank of that adapter, rounded up to one that vLLM has; 0 for none.

        Raises:
            UserError: vLLM has none as large.
        """
        if self.adapter is None:
            return 0
        rank = read_json(self.adapter / "adapter_config.json")["r"]
        allowed = [size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank]
        if not allowed:
            raise UserError(
                f"adapter: vLLM serves ranks up to 512, this one has {rank}; use adapter=merge"
            )
        return allowed[0]


def served_model(trained: Path, adapter: str, base: str | None = None) -> Served:
    """Return what to serve of a training's result.

    Args:
        trained: Result of a training: an adapter, or a whole model.
        adapter: `merge`, `lora` or `none`; see `EngineConfig.adapter`.
        base: Where the base is now, if it has moved.
    """
    manifest = read_json(trained / "manifest.json")
    if not (trained / "adapter_config.json").exists():
        if adapter == "lora":
            raise UserError(f"{trained}: is a whole model, there is no adapter; use adapter=merge")
        return Served(check_base(trained, manifest, base) if adapter == "none" else trained)
    if adapter == "merge":
        return Served(merge(trained, trained.with_name("merged"), base))
    return Served(check_base(trained, manifest, base), trained if adapter == "lora" else None)
