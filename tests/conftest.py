"""A tiny base model, a run trained on it and its completions: each made once per session."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Tests use the machine's processor also where there is a GPU, unless they are marked `gpu`.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests are never timed. The suite tries the same examples every time, `make torture` new ones.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", untimed, derandomize=True)
settings.register_profile("torture", untimed, derandomize=False)

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

BASE_YAML = """
run: {folder}/base
model: {folder}/base/untrained
train: {folder}/demo/base.jsonl
method: full
max_tokens: 1024
vocab_size: 1024
shape:
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 32  # 16 is too narrow for vLLM on a CPU
  max_position_embeddings: 16384
  tie_word_embeddings: true
  initializer_range: 0.2
trainer:
  max_steps: 60
  per_device_train_batch_size: 16
  learning_rate: 3.0e-3
  save_strategy: "no"
  eval_strategy: "no"
"""

SFT_YAML = """
run: {folder}/run
model: {folder}/base/model
train: {folder}/demo/train.jsonl
max_tokens: 1024
lora:
  r: 8
  target_modules: all-linear
trainer:
  max_steps: 12
  per_device_train_batch_size: 8
  learning_rate: 2.0e-3
  logging_steps: 1
  save_strategy: steps
  save_steps: 6
  eval_strategy: steps
  eval_steps: 6
  report_to: [tensorboard]
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know `--torture`: every try of tests/torture, and not its quick form."""
    parser.addoption("--torture", action="store_true", help="as many tries as `make torture`")


def pytest_configure(config: pytest.Config) -> None:
    """Have Hypothesis draw its examples as the suite or `make torture` wants them."""
    settings.load_profile("torture" if config.getoption("--torture") else "suite")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with invented cases, a tiny base and the config files of this session."""
    from panjue.finetune.base import main as make_base
    from panjue.prompts.demo import write_demo

    folder = tmp_path_factory.mktemp("workshop")
    write_demo(folder / "demo", {"train": 120, "test": 24, "base": 1000})
    (folder / "base.yaml").write_text(BASE_YAML.format(folder=folder), "utf-8")
    (folder / "sft.yaml").write_text(SFT_YAML.format(folder=folder), "utf-8")
    make_base(folder / "base.yaml")
    return folder


@pytest.fixture(scope="session")
def trained(workshop: Path) -> Path:
    """Return the run folder of a short LoRA training."""
    from panjue.finetune.sft import main as sft

    sft(workshop / "sft.yaml")
    return workshop / "run"


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Return the settings of every engine here: exact, and light enough for two cores."""
    engine = {"dtype": "float32", "max_num_seqs": 32, "enforce_eager": True}
    return {"max_tokens": 3072, "engine": engine}


@pytest.fixture(scope="session")
def merged(trained: Path) -> Path:
    """Return the folder of the tiny base with its adapter folded in."""
    from panjue.serve.trained import served_model

    return served_model(trained / "adapter", "merge").model


@pytest.fixture(scope="session")
def llm(merged: Path, small: dict[str, Any]) -> Iterator[Any]:
    """Return vLLM's offline engine on the tiny trained model, started once for all."""
    from panjue.serve.engine import engine

    with engine(merged, small["engine"], small["max_tokens"], seed=0) as started:
        yield started


@pytest.fixture(scope="session")
def asker(trained: Path, merged: Path, small: dict[str, Any]) -> Any:
    """Return what turns invented cases into constrained greedy requests."""
    from panjue.prompts.labels import load_labels
    from panjue.prompts.task import load_task
    from panjue.serve.ask import Asker

    labels = load_labels(trained / "adapter/labels.json")
    return Asker(load_task("judgment"), labels, merged, small["max_tokens"])


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real data; skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no real data at {SHARED}")
    return SHARED / "data"


@pytest.fixture
def answering() -> Iterator[Callable[[HTTPServer], None]]:
    """Return what lets a server answer, in a thread, as long as the test runs."""

    def start(server: HTTPServer) -> None:
        running.enter_context(server)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        running.callback(thread.join)
        running.callback(server.shutdown)

    with ExitStack() as running:
        yield start
