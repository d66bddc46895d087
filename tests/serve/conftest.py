"""One vLLM engine on the tiny trained model, started once for all tests that decode."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from panjue.prompts.labels import load_labels
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker, Served, served_model
from panjue.serve.engine import LLM, engine

MAX_TOKENS = 1024
SMALL = {"dtype": "float32", "max_num_seqs": 32, "enforce_eager": True}


@pytest.fixture(scope="session")
def merged(trained: Path) -> Path:
    """Return the folder of the tiny base with its adapter folded in."""
    return served_model(trained / "adapter", "merge").model


@pytest.fixture(scope="session")
def llm(merged: Path) -> Iterator[LLM]:
    """Return the engine."""
    with engine(merged, SMALL, MAX_TOKENS, seed=0) as started:
        yield started


@pytest.fixture(scope="session")
def asker(trained: Path, merged: Path) -> Asker:
    """Return what turns invented cases into constrained greedy requests."""
    labels = load_labels(trained / "adapter/labels.json")
    return Asker(load_task("judgment"), labels, Served(merged), MAX_TOKENS)
