"""Replicas in a Ray cluster: who gets which cases, and what happens when one ends."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ray import cloudpickle

from panjue.finetune.trained import open_trained
from panjue.prompts.example import Example
from panjue.prompts.model import CLASSIFIER, TINY_BYTES
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve import ray as driver
from panjue.serve.engine import Engine
from panjue.serve.job import Job, make_job
from panjue.serve.merge import Served
from panjue.serve.output import EarlierRows
from panjue.serve.settings import GenerateConfig
from tests.torture.conftest import RAY

RowsOf = Callable[..., list[dict[str, Any]]]


def test_rows_of_an_earlier_run_are_found_by_example(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text('{"id": "a b", "call": 0}\n{"id": "a b", "call": 2}\n{"id": 7, "call": 0}\n')
    earlier = EarlierRows(path)
    assert set(earlier.of(Example("a b", ""))) == {"a b 0", "a b 2"}
    assert set(earlier.of(Example(7, ""))) == {"7 0"}
    assert earlier.of(Example("a", "")) == {}


def test_calls_after_one_on_which_the_engine_failed_are_asked_again_too(tmp_path: Path) -> None:
    """Their questions may depend on its reply."""
    failed = {"texts": ["{"], "finish": ["error"]}
    rows = [{"id": 7, "call": call, "texts": ["{}"], "finish": ["stop"]} for call in range(11)]
    rows[9] |= failed
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(dump(row) + "\n" for row in reversed(rows)), "utf-8")
    assert list(EarlierRows(path).of(Example(7, ""))) == [f"7 {call}" for call in range(9)]
    with path.open("a", encoding="utf-8") as out:
        out.write(dump({**rows[9], "finish": ["stop"]}) + "\n")
    assert len(EarlierRows(path).of(Example(7, ""))) == 11, "the last row of a call counts"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Return what came of all scenarios of `fleet.py`."""
    words = [sys.executable, str(Path(__file__).with_name("fleet.py"))]
    with RAY, TemporaryDirectory() as folder:  # Ray's own folder may name a cluster that has died
        environment = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("deaths", "calls"), [(0, 1), (5, 3)])
def test_no_row_is_lost_or_doubled_when_replicas_die(
    outcomes: dict[str, Any], deaths: int, calls: int
) -> None:
    found = outcomes[f"{deaths} deaths, {calls}"]
    assert len(found["keys"]) == len(set(found["keys"])) == 60 * calls
    assert found["error"] == ""
    assert bool(found["again"]) == bool(deaths)
    assert (f"{found['again']} cases given out again" in found["said"]) == bool(deaths)


def test_replicas_that_always_die_end_the_run(outcomes: dict[str, Any]) -> None:
    found = outcomes["always"]
    assert found["error"].startswith("ray: all replicas have ended for good: The actor died")
    assert found["error"].endswith("finished rows are kept, run the same command to resume")
    assert 10 <= len(found["keys"]) == len(set(found["keys"]))


def test_an_engine_that_cannot_start_says_why(outcomes: dict[str, Any]) -> None:
    assert outcomes["broken"]["error"] == "engine: is broken"


def test_one_bad_machine_does_not_end_the_run(outcomes: dict[str, Any]) -> None:
    assert (outcomes["one bad"]["error"], len(outcomes["one bad"]["keys"])) == ("", 60)


def test_the_run_can_be_stopped_while_it_waits(outcomes: dict[str, Any]) -> None:
    assert outcomes["stopped"]["error"] == "stopped"


def test_a_missing_cluster_is_named_in_one_line(outcomes: dict[str, Any]) -> None:
    assert outcomes["no cluster"]["error"].startswith("ray: Could not find any running Ray")
    assert "serve/README.md" in outcomes["no cluster"]["error"]
    assert "\n" not in outcomes["no cluster"]["error"]


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("merged", "model.safetensors"),
        ("adapter", "labels.json"),
        ("adapter", CLASSIFIER),
        ("adapter", "adapter_model.safetensors"),
    ],
)
def test_a_replica_with_another_model_labels_or_classifier_is_refused(
    folder: str, file: str, trained: Path, merged: Path, tmp_path: Path
) -> None:
    """Its machine has copies, which may be of another training."""
    run = shutil.copytree(trained, tmp_path / "run")
    config = GenerateConfig.model_validate({})
    job = Job(config, run, open_trained(run), "judgment", served=Served(run / merged.name))
    of_driver = driver.fingerprints(job)
    with (run / folder / file).open("ab") as copy:
        copy.write(b" ")
    replica = driver.Replica(job, driver.versions("judgment"), of_driver)
    with pytest.raises(UserError, match=f"other files than the driver: {run}/{folder}/{file}: "):
        asyncio.run(replica.start())


def test_a_replica_sends_the_models_own_log_probabilities(
    llm: Engine,
    rows_of: RowsOf,
    trained: Path,
    merged: Path,
    workshop: Path,
    tmp_path: Path,
) -> None:
    """They are those of an engine without Ray, also when they have been sent to the driver."""

    @asynccontextmanager
    async def running(*_: object) -> AsyncIterator[Engine]:
        yield llm

    task = load_task("judgment")
    config = GenerateConfig.model_validate({})
    job = replace(make_job(tmp_path, open_trained(trained), config), served=Served(merged))
    replica = driver.Replica(sent(job), driver.versions("judgment"), driver.fingerprints(job))
    examples = list(Reader(task).read(workshop / "demo/test.jsonl"))[:3]

    async def answers() -> list[dict[str, Any]]:
        async with replica._running:
            await replica.start()
            return [sent(row) for one in examples async for row in replica.answer(one, {})]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "running_engine", running)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the replica sets it
        found = llm.runner.run(answers())
    plain = rows_of(llm, job.question_maker(), examples, in_flight=1)
    assert [row["id"] for row in found] == [example.id for example in examples]
    for row, other, example in zip(found, plain, examples, strict=True):
        assert row["texts"] == other["texts"]
        assert len(row["logprobs"]) == len(other["logprobs"]) == len(example.names)
        for numbers, expected in zip(row["logprobs"], other["logprobs"], strict=True):
            assert numbers.keys() == set(task.answer.fields)
            for name, of_labels in numbers.items():
                assert of_labels == pytest.approx(expected[name], abs=2e-3)


def sent(value: Any) -> Any:
    """Return a value as another process of Ray gets it."""
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def test_a_replica_takes_its_gpus_or_its_share_of_a_machines_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    config = GenerateConfig.model_validate({"engine": engine, "ray": "auto", "replicas": 3})
    job = Job(config, Path("run"), None, "judgment", served=Served(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.touch()
    os.truncate(weights, TINY_BYTES + 1)
    cores = [("CPU", 16.0, True), ("CPU", 4.0, True), ("CPU", 1.0, False), ("memory", 1.0, True)]
    nodes = [{"Alive": alive, "Resources": {kind: count}} for kind, count, alive in cores]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(driver, "on_cpu", lambda: False)
    assert driver.resources(job) == {"num_cpus": 1, "num_gpus": 4}
    monkeypatch.setattr(driver, "on_cpu", lambda: True)
    assert driver.resources(job) == {"num_cpus": 2}, "two replicas on the smaller machine"
    os.truncate(weights, TINY_BYTES)
    assert driver.resources(job) == {"num_cpus": 1}, "a tiny model has one thread"
