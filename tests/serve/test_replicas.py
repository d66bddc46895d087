"""Replicas of the engine: who gets which cases, and what happens when one ends."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.example import Example, call_key
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import Rows
from panjue.serve import replicas, settings
from panjue.serve.fleet import reason_of
from panjue.serve.work import LARGEST, Batch, Work, batches


def work(count: int) -> Work:
    return Work((Example(i, f"案情{i}") for i in range(count)), count, None)


@given(st.integers(1, 3000), st.integers(1, 70), st.integers(1, 64))
def test_batches_hold_every_example_once_in_order_and_never_grow(
    count: int, replicas: int, in_flight: int
) -> None:
    found = list(batches(work(count), replicas, in_flight))
    assert [e.id for batch in found for e in batch.examples] == list(range(count))
    sizes = [len(batch.examples) for batch in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= LARGEST * in_flight
    assert len(sizes) >= min(count, replicas), "work for all"


def test_a_large_file_goes_out_in_large_batches_first() -> None:
    sizes = [len(b.examples) for b in batches(work(400), 2, 16)]
    # 400 left: a quarter is 100; 300: 75; then 56, 42, 31, 24, 18, and 16 as `in_flight` is.
    assert sizes == [100, 75, 56, 42, 31, 24, 18, 16, 16, 16, 6]


def test_a_batch_that_is_given_out_again_lacks_what_is_answered() -> None:
    batch = Batch([Example(i, "案情") for i in range(4)], {}, solved=2)
    batch.add({"id": 1, "texts": ["一"]})
    batch.add({"id": 3, "refused": "…"})
    again = batch.again()
    assert [e.id for e in again.examples] == [0, 2]
    assert (again.rows, again.solved) == ({}, 0)


def test_rows_of_calls_go_along_with_their_examples() -> None:
    """Their examples may be unsolved; and the solved ones are not counted twice."""
    batch = Batch([Example(i, "案情") for i in range(2)], {}, solved=1)
    made = [{"id": i, "call": call} for i in range(2) for call in range(2)]
    for row in made:
        batch.add(row)
    again = batch.again()
    assert [e.id for e in again.examples] == [0, 1]
    assert (list(again.rows.values()), again.solved) == (made, 1)


def test_rows_of_an_earlier_run_are_found_by_example(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text('{"id": "a b", "call": 0}\n{"id": "a b", "call": 2}\n{"id": 7, "call": 0}\n')
    work = Work(iter(()), 0, Rows(path, key=call_key))
    assert set(work.rows_of(Example("a b", ""))) == {"a b 0", "a b 2"}
    assert set(work.rows_of(Example(7, ""))) == {"7 0"}
    assert work.rows_of(Example("a", "")) == {}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Return what came of all scenarios of `fleet.py`."""
    words = [sys.executable, str(Path(__file__).with_name("fleet.py"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("deaths", "calls"), [(0, 1), (5, 1), (5, 3)])
def test_no_row_is_lost_or_doubled_when_replicas_die(
    outcomes: dict[str, Any], deaths: int, calls: int
) -> None:
    found = outcomes[f"{deaths} deaths, {calls}"]
    assert len(found["keys"]) == len(set(found["keys"])) == 60 * calls
    assert found["last"][:4] == [60, 60 * calls, 120 * calls, 0], "solved, calls, tokens, in flight"
    assert found["grows"]
    assert bool(found["again"]) == bool(deaths)
    assert (f"{found['again']} cases given out again" in found["last"][4]) == bool(deaths)


def test_replicas_that_always_die_end_the_run(outcomes: dict[str, Any]) -> None:
    found = outcomes["always"]
    assert found["error"].startswith("ray: all replicas have ended for good: The actor died")
    assert found["error"].endswith("finished rows are kept, run the same command to resume")
    assert 10 <= len(found["keys"]) == len(set(found["keys"]))


def test_a_replica_that_cannot_start_says_why(outcomes: dict[str, Any]) -> None:
    assert outcomes["broken"]["error"] == "engine: is broken"


def test_the_run_can_be_stopped_while_it_waits(outcomes: dict[str, Any]) -> None:
    assert outcomes["stopped"]["error"] == "stopped"


def test_a_cluster_on_this_machine_asks_for_a_token(outcomes: dict[str, Any]) -> None:
    """Its ports are open to the network, and what reaches them could run code."""
    assert "authentication token" in outcomes["stranger"]["error"].lower()


def test_no_cluster_is_said_in_one_line(outcomes: dict[str, Any]) -> None:
    assert outcomes["no cluster"]["error"].startswith("ray=auto: ")
    assert "ray start --head" in outcomes["no cluster"]["error"]
    assert "\n" not in outcomes["no cluster"]["error"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "Found multiple active Ray instances: {'a:1', 'b:1'}. Please specify the one to …",
            "Found multiple active Ray instances: {'a:1', 'b:1'}; set RAY_ADDRESS=HOST:6379 to one "
            "of them",
        ),
        (
            "Version mismatch: The cluster was started with:\n    Ray: 2.50\nThis process has:\n"
            "    Ray: 2.60\n",
            "Version mismatch: The cluster was started with: Ray: 2.50 This process has: Ray: 2.60",
        ),
    ],
)
def test_what_ray_says_is_one_line_with_its_own_way_out(said: str, expected: str) -> None:
    assert reason_of(ConnectionError(said)) == expected


def test_the_machines_of_a_cluster_are_counted_for_the_kind_of_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 20.0, "GPU": 8.0})
    monkeypatch.setattr(replicas, "on_cpu", lambda: False)
    replicas.check_build()
    takes = {"num_cpus": 1.0, "num_gpus": 2.0}
    text = "each takes 2 GPU, the largest machine 8, the cluster has 8"
    assert replicas.capacity(takes) == text
    monkeypatch.setattr(replicas, "on_cpu", lambda: True)
    assert replicas.capacity(takes).startswith("each takes 1 CPU, the largest machine 16")
    with pytest.raises(
        UserError, match="the cluster has 8 GPUs, but vLLM is installed for the CPU"
    ):
        replicas.check_build()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["replicas=2"], "replicas: several need ray=auto"),
        (["ray=auto", "endpoint=http://127.0.0.1:1/v1#x"], "leave out `ray` or `endpoint`"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    answered: Path, panjue: Callable[..., CompletedProcess[str]], words: list[str], named: str
) -> None:
    done = panjue("generate", answered / "generate.yaml", *words)
    assert done.returncode == 2
    assert named in done.stderr


def test_without_ray_the_command_says_how_to_get_it(
    answered: Path, panjue: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: None)
    done = panjue("generate", answered / "generate.yaml", "ray=auto")
    assert done.returncode == 2
    assert "panjue: ray: is not installed; " in done.stderr
