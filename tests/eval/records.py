"""What every record of a training and of answers has, and the types of the fixtures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.files import sha256, write_json

Row = Callable[..., dict[str, Any]]
Write = Callable[..., Path]

ANSWERED: dict[str, Any] = {
    **{"task": "judgment", "prompt_sha256": "", "adapter": "lora", "constrained": True},
    **{"max_tokens": 3072, "seed": 0, "engine": {}, "sampling": {}, "samples": 0},
}
TRAINED: dict[str, Any] = {
    **{"task": "judgment", "base": "base", "base_sha256": "", "train": "train.jsonl"},
    **{"train_sha256": "", "prompt_sha256": "", "max_tokens": 3072, "method": "lora"},
    **{"dtype": "float32", "seed": 0, "patience": 3},
    **{"trainer": {}, "lora": {}, "quantization": {}},
}


def write_answers(folder: Path, test: Path, **more: Any) -> None:
    """Write the record of answers to a test file."""
    made = {**ANSWERED, "test": str(test), "test_sha256": sha256(test)}
    write_json(folder / "manifest.json", {**made, **more})
