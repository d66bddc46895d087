"""Examples -> token rows: made once, cached on disk and memory-mapped."""

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

from panjue.finetune.processes import wait_for
from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump, sync, write_json
from panjue.prompts.plumbing.parts import SYNTAX
from panjue.prompts.render import reply_ids, reply_parts
from panjue.prompts.shorten import shortened_prompt
from panjue.prompts.task import Task

IGNORED = -100
"""Label of a token without loss: the whole prompt."""

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
    """What happened to the examples of one file.

    Attributes:
        tokens: Length of each row, prompt plus reply.
        refused: `id: reason` of each refused example.
        shortened: (id, tokens before, tokens after) of each prompt that `shorten` shortened.
        parts: Fields of a reply; the rows' column `parts` has indices into this list.
        groups: Names of groups; the rows' column `group` has indices into this list.
        notes: `id: warning` about examples that are still used.
    """

    tokens: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    shortened: list[tuple[str, int, int]] = field(default_factory=list)
    parts: list[str] = field(default_factory=lambda: [SYNTAX])
    groups: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def questions(task: Task, examples: Iterator[Example], report: Report) -> Iterator[Example]:
    """Yield each example's training questions with answers: one per model call."""
    for example in examples:
        report.notes += [f"{example.id}: {note}" for note in example.notes]
        yield from task.answer.training_examples(example)


def rows(  # noqa: PLR0913, PLR0917  # no two belong together
    task: Task,
    examples: Iterator[Example],
    tokenizer: Any,
    labels: Labels,
    max_tokens: int,
    report: Report,
    attribute: str | None = None,
) -> Iterator[Row]:
    """Yield token rows with loss on the reply only, and record the examples in `report`.

    Groups are the values of `attribute`; examples without one are in the group `UNKNOWN`.

    No reply is ever cut. An example is refused, by its id, if its prompt cannot be shortened
    enough, or if its reply does not fit or is invalid (for example, an empty label set).
    """
    for example in examples:
        reply = task.ask.target(example)
        if repairs := task.ask.decode(reply, example, labels).repairs:
            report.refused.append(f"{example.id}: its gold answer is invalid: {repairs[0]}")
            continue
        shortened, _, prompt, room = shortened_prompt(task, example, labels, tokenizer, max_tokens)
        completion = reply_ids(tokenizer, reply)
        if not shortened.fits or len(prompt) + len(completion) > max_tokens:
            report.refused.append(
                f"{example.id}: {len(prompt)} prompt tokens and {len(completion)} reply tokens "
                f"({room} are reserved for a reply) exceed max_tokens={max_tokens}"
            )
            continue
        if shortened.dropped and task.ask.decode(reply, shortened.example, labels).repairs:
            report.refused.append(
                f"{example.id}: its gold answer is not in the shortened text; raise max_tokens"
            )
            continue
        if shortened.dropped:
            report.shortened.append((str(example.id), shortened.full_tokens, shortened.tokens))
        report.tokens.append(len(prompt) + len(completion))
        parts = reply_parts(tokenizer, reply)
        report.parts.extend(part for part in dict.fromkeys(parts) if part not in report.parts)
        group = example.groups.get(attribute, UNKNOWN) if attribute else UNKNOWN
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
    *,
    waits: bool = False,
) -> tuple[Dataset, Report]:
    """Return the rows that `make` yields, from the cache in `folder` if it has the same key.

    New parts and groups are appended to `parts` and `groups`, so that their indices stay the same.
    With `waits` another process makes them, and this one waits for it.
    """
    key = {**key, "parts": list(parts), "groups": list(groups)}
    entry = folder / hashlib.sha256(dump(key).encode()).hexdigest()[:16]
    if waits:
        wait_for(entry / "report.json")
    if not (entry / "report.json").exists():
        shutil.rmtree(entry, ignore_errors=True)
        entry.mkdir(parents=True)
        report = Report(parts=list(parts), groups=list(groups))
        writer = ArrowWriter(path=str(entry / "rows.arrow"), features=FEATURES)
        for row in make(report):
            writer.write(row)
        writer.finalize()
        sync(entry)
        write_json(entry / "report.json", asdict(report))  # last: marks the cache complete
    report = Report(**json.loads((entry / "report.json").read_text("utf-8")))
    return Dataset.from_file(str(entry / "rows.arrow")), report


def pack(rows: Dataset, size: int) -> Dataset:
    """Return packs of whole rows, each of at most `size` tokens, by best-fit decreasing.

    Column `seq_lengths` has the length of each example in the pack.
    """
    return pack_dataset(rows.select_columns(["input_ids", "labels", "parts"]), size, "bfd")


PADDING = -1
"""Part index of a padding token."""


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a batch padded on the right.

    There is no attention mask: attention is causal, so no real token sees the padding, and kernels
    are fastest without a mask. In packed rows the positions restart at each example; from them
    transformers builds a mask, so that no example sees another.
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
    """Return 0, 1, … for each of `lengths`, and again for the padding up to `width`."""
    return torch.cat([torch.arange(length) for length in (*lengths, width - sum(lengths))])
