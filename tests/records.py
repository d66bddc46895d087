"""What every record of a training and of answers has, and the types of the fixtures."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from panjue.finetune.classifier.classifier import Classifier
from panjue.finetune.classifier.features import View
from panjue.finetune.classifier.label_sets import LabelField
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.task import Task

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


def believing(task: Task, logits: Mapping[str, Mapping[str, float]]) -> Classifier:
    """Return a classifier that believes the same of every text: field -> label -> logit."""
    view = View(np.zeros(1, np.uint32), np.ones(1, np.float32))
    fields = {}
    bias: list[float] = []
    for name, of_labels in logits.items():
        fields[name] = LabelField(list(of_labels), name in task.answer.sets, scale=1, shift=0)
        bias += of_labels.values()
    weights = csr_array((1, len(bias)), dtype=np.float32)
    return Classifier(
        label_fields=task.answer,
        views=[view, view],
        weights=[weights, weights],
        bias=np.array(bias, np.float32),
        fields=fields,
    )


def write_training(folder: Path, classifier: Classifier, **more: Any) -> None:
    """Write the record of a training that fitted this classifier."""
    folder.mkdir(parents=True, exist_ok=True)
    classifier.save(folder / CLASSIFIER)
    digest = sha256(folder / CLASSIFIER)
    write_json(folder / "manifest.json", {**TRAINED, "classifier_sha256": digest, **more})
