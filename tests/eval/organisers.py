"""Run the organisers' own code: one JSON line a job in, one JSON line a result out.

usage: PYTHONPATH=THEIR_CODE python organisers.py TASK < jobs > results

`test_official.py` starts this with a Python that has what their code needs, and no panjue. An error
of their code is a result: "stops: …".
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Job = Mapping[str, Any]


def judgment(job: Job) -> Any:
    """CAIL2024, drdz/baseline: the metrics of judgments, in the order of gold's defendants.

    Their code reads the stage's lists in `data/` of the working folder. A defendant without a
    judgment is null.
    """
    import torch

    data = import_module("preprocess_data")
    metrics = import_module("case_level_metrics")
    _, charges, articles, penalties, counts = data.preprocess_data(job["gold"])
    gold = {"charge": charges, "article": articles, "penalty": penalties}
    told: dict[str, list[list[float]]] = {"charge": [], "article": [], "penalty": []}
    for person in job["judgments"]:
        classes = [0.0] * data.penalty_num
        if person:
            classes[person["penalty"]] = 1.0  # as their code sets that of gold
        told["charge"].append(_hot(data.charge2idx, person["charges"] if person else []))
        told["article"].append(_hot(data.article2idx, person["articles"] if person else []))
        told["penalty"].append(classes)
    result = metrics.get_case_level_metrics_by_per_defendant_metrics(
        {name: torch.tensor(rows, dtype=torch.float32) for name, rows in told.items()},
        {name: torch.tensor(rows, dtype=torch.float32) for name, rows in gold.items()},
        counts,
    )
    return {**result, "final": metrics.calculate_final_score(result)}


def _hot(places: Mapping[Any, int], labels: list[Any]) -> list[float]:
    chosen = {places[label] for label in labels if label in places}
    return [float(place in chosen) for place in range(len(places))]


def reading(job: Job) -> Any:
    """CAIL2019, 阅读理解/evaluate: scores by domain, and the means before they are rounded."""
    spec = find_spec("evaluate")
    assert spec is not None
    assert spec.origin is not None
    # A line at its end begins with a tab, which Python 3 refuses.
    source = Path(spec.origin).read_text("utf-8").expandtabs()
    names: dict[str, Any] = {"__name__": "evaluate"}
    exec(compile(source, "evaluate.py", "exec"), names)
    evaluator = names["CJRCEvaluator"](job["gold"])
    told = evaluator.preds_to_dict(job["submission"])
    exact, overlap = evaluator.get_raw_scores(told)
    questions = len(evaluator.gold_data)
    means = {"em": sum(exact.values()) / questions, "f1": sum(overlap.values()) / questions}
    return {**evaluator.model_performance(told), "means": means}


def cloze(job: Job) -> Any:
    """KCT 1.0: [kind of error, code, score]."""
    return import_module("evaluate").judge(job["gold"], job["submission"])


FAIRLEX = {"severity": "cail", "ecthr": "ecthr", "scotus": "scotus", "fscs": "fscs"}
"""Task -> the data set of fairlex/dataloaders."""


def fairlex(job: Job) -> Any:
    """FairLex: macro F1 of all cases and of every group, by the `eval` of a data set.

    The data set is not loaded: it gets the groups, and the labels as its models give them.
    """
    import torch

    name = FAIRLEX[job["task"]]
    module = import_module(f"dataloaders.{name}_dataset")
    kind = next(kind for kind in vars(module) if kind.lower() == f"{name}dataset")
    groups = torch.tensor(job["groups"]).unsqueeze(1)
    dataset = object.__new__(getattr(module, kind))
    dataset._metadata_fields = dataset.group_by_fields = ["group"]
    dataset._metadata_map = {"group": list(range(max(job["groups"]) + 1))}
    dataset._metadata_array = groups
    dataset._split_scheme = "official"
    dataset.initialize_eval_grouper()
    if job["task"] == "ecthr":
        gold = torch.tensor([_hot(_numbers(job), labels) for labels in job["gold"]]).long()
        logits = torch.tensor([_hot(_numbers(job), labels) for labels in job["told"]]) - 0.5
    else:
        gold = torch.tensor(job["gold"])
        logits = torch.nn.functional.one_hot(torch.tensor(job["told"]), job["classes"]).float()
    results, _ = dataset.eval(logits, gold, groups)
    return results


def _numbers(job: Job) -> dict[int, int]:
    return {number: number for number in range(job["classes"])}


TASKS: dict[str, Callable[[Job], Any]] = {
    "judgment": judgment,
    "reading": reading,
    "cloze": cloze,
    "fairlex": fairlex,
}


def main() -> None:
    run = TASKS[sys.argv[1]]
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                result = run(json.loads(line))
        except Exception as error:  # of whatever kind: it is what their code does
            result = f"stops: {type(error).__name__}: {error}"
        print(json.dumps(result))


if __name__ == "__main__":
    main()
