"""Examples -> token rows on disk: made once, memory-mapped ever after."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from torch import Tensor
from trl import pack_dataset

from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.fit import fit_prompt
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump, sync, write_json
from panjue.prompts.plumbing.parts import SYNTAX
from panjue.prompts.render import reply_ids, reply_parts
from panjue.prompts.task import Task

IGNORED = -100
"""The label where there is no loss: the whole prompt."""

FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "parts": List(Value("int16")),
        "group": Value("int16"),
        "length": Value("int32"),
    }
)


Row = dict[str, Any]
"""`input_ids`, `labels` and `parts`, one number per token, their `length`, and the `group`."""


@dataclass
class Report:
    """What became of the examples of one file.

    Attributes:
        tokens: Prompt plus reply, per row kept.
        refused: `id: why` of every example left out.
        shortened: (id, tokens before, tokens after) of every prompt that `fit` shortened.
        parts: The fields of a reply; column `parts` of the rows counts through them.
        groups: The groups by the attribute asked for; column `group` counts through them.
        notes: `id: what` somebody should know of examples that are good all the same.
    """

    tokens: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    shortened: list[tuple[str, int, int]] = field(default_factory=list)
    parts: list[str] = field(default_factory=lambda: [SYNTAX])
    groups: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def questions(task: Task, examples: Iterator[Example], report: Report) -> Iterator[Example]:
    """Yield the questions of the examples with their answers: one each, or those of its calls."""
    for example in examples:
        report.notes += [f"{example.id}: {note}" for note in example.notes]
        yield from task.answer.training_examples(example)


def rows(  # noqa: PLR0913, PLR0917  # each is used by somebody
    task: Task,
    examples: Iterator[Example],
    tokenizer: Any,
    labels: Labels,
    max_tokens: int,
    report: Report,
    by: str | None = None,
) -> Iterator[Row]:
    """Yield token rows with loss on the reply only, noting in `report` what was done.

    Groups are those by the attribute `by`; an example without it is in a group of its own.

    No reply is ever cut: an example whose prompt cannot be shortened enough, or whose reply does
    not fit or is not valid (a label set is empty, say), is refused by its id.
    """
    for example in examples:
        reply = task.ask.target(example)
        if repairs := task.ask.decode(reply, example, labels).repairs:
            report.refused.append(f"{example.id}: its gold answer is no valid reply: {repairs[0]}")
            continue
        fitted, _, prompt, room = fit_prompt(task, example, labels, tokenizer, max_tokens)
        completion = reply_ids(tokenizer, reply)
        if not fitted.fits or len(prompt) + len(completion) > max_tokens:
            report.refused.append(
                f"{example.id}: {len(prompt)} tokens of prompt and {len(completion)} of reply "
                f"({room} are kept free for one) exceed max_tokens={max_tokens}"
            )
            continue
        if fitted.dropped and task.ask.decode(reply, fitted.example, labels).repairs:
            report.refused.append(
                f"{example.id}: its gold answer is not in the text that fits; raise max_tokens"
            )
            continue
        if fitted.dropped:
            report.shortened.append((str(example.id), fitted.full_tokens, fitted.tokens))
        report.tokens.append(len(prompt) + len(completion))
        parts = reply_parts(tokenizer, reply)
        report.parts.extend(part for part in dict.fromkeys(parts) if part not in report.parts)
        group = example.groups.get(by, UNKNOWN) if by else UNKNOWN
        if group not in report.groups:
            report.groups.append(group)
        yield {
            "input_ids": prompt + completion,
            "labels": [IGNORED] * len(prompt) + completion,
            "parts": [0] * len(prompt) + [report.parts.index(part) for part in parts],
            "group": report.groups.index(group),
            "length": len(prompt) + len(completion),
        }


def cached(
    folder: Path,
    key: dict[str, Any],
    make: Callable[[Report], Iterator[Row]],
    parts: Sequence[str] = (SYNTAX,),
    groups: Sequence[str] = (),
) -> tuple[Dataset, Report]:
    """Return the rows that `make` yields, from `folder` where it ran under the same key before.

    Their columns `parts` and `group` count through these and what is found beyond them.
    """
    key = {**key, "parts": list(parts), "groups": list(groups)}
    place = folder / hashlib.sha256(dump(key).encode()).hexdigest()[:16]
    if not (place / "report.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        report = Report(parts=list(parts), groups=list(groups))
        writer = ArrowWriter(path=str(place / "rows.arrow"), features=FEATURES)
        for row in make(report):
            writer.write(row)
        writer.finalize()
        sync(place)
        write_json(place / "report.json", asdict(report))  # last: its presence says all is there
    report = Report(**json.loads((place / "report.json").read_text("utf-8")))
    return Dataset.from_file(str(place / "rows.arrow")), report


def pack(rows: Dataset, size: int) -> Dataset:
    """Return packs of whole rows, best fit first, each of at most `size` tokens.

    Column `seq_lengths` says where one example ends and the next begins.
    """
    return pack_dataset(rows.select_columns(["input_ids", "labels", "parts"]), size, "bfd")


PADDING = -1
"""The part of a token that is none."""


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a batch padded on the right.

    There is no attention mask: attention is causal, so no real token ever sees the padding, and
    the kernels are fastest without one. Packed rows carry positions that start again at every
    example, from which transformers makes a mask that keeps the examples apart.
    """
    width = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([[*row[name], *[fill] * (width - len(row[name]))] for row in rows])
        for name, fill in (("input_ids", 0), ("labels", IGNORED), ("parts", PADDING))
    }
    if "group" in rows[0]:
        batch["group"] = torch.tensor([row["group"] for row in rows])
    if "seq_lengths" in rows[0]:
        batch["position_ids"] = torch.stack([positions(row["seq_lengths"], width) for row in rows])
    return batch


def positions(lengths: Sequence[int], width: int) -> Tensor:
    """Return 0, 1, … for each of `lengths`, and for the padding up to `width` behind them."""
    parts = [*lengths, width - sum(lengths)]
    return torch.cat([torch.arange(length) for length in parts])
