"""The text classifier alone: its cost, and its scores on other cases.

usage: .venv/bin/python tests/bench/classifier.py TASK TRAIN TEST [MIX] [--into ADAPTER]

It is fitted as in `panjue sft`: the tenth of TRAIN that training holds out is left out. With
`--into` it knows the labels of that adapter and takes the place of its classifier: for an adapter
that was trained on a part of TRAIN, for example the shorter cases, and has held out the same ones.
The manifest then names TRAIN as the training file, so that `held_out=true test=TRAIN` answers the
tenth of TRAIN that neither has seen, for `panjue tune`.
"""

import argparse
import resource
import time
from pathlib import Path

from rich.console import Console

from panjue.eval.calibration import calibration
from panjue.eval.decide import Decider
from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.eval.pool import Pool
from panjue.finetune.settings import SftConfig
from panjue.finetune.sft import fit_classifier, training_set
from panjue.prompts.labels import load_labels
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task


def main(
    name: str, train: Path, test: Path, mix: Path | None = None, into: Path | None = None
) -> None:
    """Fit, decide every case of `test`, and print; put the classifier into an adapter."""
    task, console = load_task(name), Console(soft_wrap=True)
    reader = Reader(task)
    files = {"train": train, "mix": mix}
    config = SftConfig.model_validate({"task": name, "run": "none", "model": "none", **files})
    began = time.monotonic()
    if into:
        labels = load_labels(into / "labels.json")
    else:
        labels = task.ask.labels(training_set(config, reader))
    classifier = fit_classifier(config, reader, labels)
    seconds, memory = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    console.print(f"fitted in {seconds:.0f} s, {memory / 2**20:.2f} GiB at the most")
    if into:
        classifier.save(into / CLASSIFIER)
        changed = {
            "classifier_sha256": sha256(into / CLASSIFIER),
            "train": str(train),
            "train_sha256": sha256(train),
        }
        write_json(into / "manifest.json", {**read_json(into / "manifest.json"), **changed})
    decider, table = Decider(task, labels, pool=Pool(classifier, {})), ScoreTable(task)
    confidences: dict[str, list[tuple[float, bool]]] = {f: [] for f in task.answer.fields}
    began = time.monotonic()
    for example in reader.read(test):
        assert example.answer is not None
        decision, gold = decider.decide_alone(example), task.answer.items_of(example.answer)
        row = task.data.write(example, decision.answer)
        values = metric_values(task, task.gold(example), row, str(test))
        table.add(example.groups, task.score.weight(example), values)
        chosen = task.answer.items_of(decision.answer)
        for item, right, sure in zip(chosen, gold, decision.confidence, strict=True):
            for field, confidence in sure.items():
                is_right = _as_set(item[field]) == _as_set(right[field])
                confidences[field].append((confidence, is_right))
    seconds = time.monotonic() - began
    summary = summarize(table)
    console.print(f"{summary.examples} cases, {1000 * seconds / summary.examples:.1f} ms each")
    for metric, value in summary.mean.items():
        low, high = summary.interval[metric]
        console.print(f"{metric:18s} {value:.4f}   {low:.4f} - {high:.4f}")
    for field, pairs in confidences.items():
        error = calibration(*zip(*pairs, strict=True)).error
        console.print(f"{field:18s} ECE {error:.3f}")


def _as_set(value: object) -> object:
    return frozenset(value) if isinstance(value, list) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("mix", type=Path, nargs="?")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    main(options.name, options.train, options.test, options.mix, options.into)
