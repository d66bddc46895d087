"""Turn examples into token rows, made once and memory-mapped, and rows into packs and batches."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from trl import pack_dataset

from panjue.finetune.distributed import make_once
from panjue.finetune.examples import Examples
from panjue.finetune.packed_attention import segments
from panjue.finetune.rules import shared_rules
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, merged_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_folder, dump, read_json, write_json
from panjue.prompts.render import reply_ids
from panjue.prompts.shorten import shortened_prompt
from panjue.prompts.task import Task

IGNORED = -100
"""Label id of tokens without loss; all tokens of the prompt have it."""

FEATURES = Features(
    {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "length": Value("int32")}
)

TrainingRow = dict[str, Any]
"""`input_ids` and `labels`, one number per token, and their `length`."""


@dataclass
class RowReport:
    """What happened to the examples when they were turned into rows."""

    tokens: list[int] = field(default_factory=list)  # tokens of each row, prompt plus reply
    refused: list[str] = field(default_factory=list)  # `id: reason`
    too_long: list[int] = field(default_factory=list)
    """The `max_tokens` that each refused example needs, if that is the reason."""
    shortened: list[tuple[str, int, int]] = field(default_factory=list)  # id, tokens before, after
    notes: list[str] = field(default_factory=list)  # `id: warning`, for examples that are used


@dataclass(frozen=True)
class TrainingRows:
    """The token rows of a training, and what happened to their examples."""

    train: Dataset
    report: RowReport
    held_out: Dataset
    held_report: RowReport

    def packed(self, size: int) -> "TrainingRows":
        """Return the same examples in packs of at most `size` tokens."""
        held_out = pack(self.held_out, size) if len(self.held_out) else self.held_out
        return replace(self, train=pack(self.train, size), held_out=held_out)


@dataclass(frozen=True)
class RowMaker:
    """Makes token rows with loss on the reply only."""

    task: Task
    tokenizer: Any
    labels: Labels
    max_tokens: int

    def rows(self, examples: Iterable[Example], report: RowReport) -> Iterator[TrainingRow]:
        """Yield the rows of the examples, one per model call, and record them in `report`.

        No reply is ever cut. An example is refused and its id recorded if its prompt cannot be
        shortened enough, its reply does not fit, or its reply is invalid (for example, an empty
        label set) or has other labels than `labels`.
        """
        for example in examples:
            report.notes += [f"{example.id}: {note}" for note in example.notes]
            for question in self.task.training_examples(example):
                row = self._row(question, report)
                if isinstance(row, str):
                    report.refused.append(f"{question.id}: {row}")
                else:
                    report.tokens.append(row["length"])
                    yield row

    def _row(self, example: Example, report: RowReport) -> TrainingRow | str:
        """Return the row of an example, or why it is refused."""
        task = self.task
        labels = self.labels
        reply = task.ask.target(example)
        repairs = task.ask.decode(reply, example, labels).repairs
        if repairs:
            with_own = merged_labels([labels, task.ask.labels([example])])
            problem = "invalid"
            if not task.ask.decode(reply, example, with_own).repairs:
                # The case is held out, or beyond `limit`. So `labels` may lack some of its own.
                problem = "valid, but beyond the labels of the cases to train on"
            return f"its gold answer is {problem}: {repairs[0]}"
        short, _, prompt, room = shortened_prompt(
            task, example, labels, self.tokenizer, self.max_tokens
        )
        completion = reply_ids(self.tokenizer, reply)
        if not short.fits or len(prompt) + len(completion) > self.max_tokens:
            needed = len(prompt) + room  # the max_tokens that would be enough for this prompt
            if len(completion) > room:
                # The reply needs more than its room. Tokens that a higher max_tokens adds would go
                # to the prompt first, until it has the whole text.
                needed = short.full_tokens + len(completion)
            report.too_long.append(needed)
            reason = (
                f"{len(prompt)} prompt tokens and {len(completion)} reply tokens "
                f"({room} are reserved for a reply) exceed max_tokens={self.max_tokens}; raise it"
            )
            if "opinions" in example.inputs:
                reason += ", or set opinions=false, which makes prompts shorter"
            return reason
        if short.dropped:
            if task.ask.decode(reply, short.example, labels).repairs:
                return "its gold answer is not in the shortened text; raise max_tokens"
            report.shortened.append((str(example.id), short.full_tokens, short.tokens))
        return {
            "input_ids": prompt + completion,
            "labels": [IGNORED] * len(prompt) + completion,
            "length": len(prompt) + len(completion),
        }


def training_rows(
    folder: Path,
    key: Mapping[str, Any],
    maker: RowMaker,
    examples: Examples,
    show: Callable[[Example], Example] | None,
) -> TrainingRows:
    """Return the rows to train on and the held-out rows, from the cache in `folder` if possible.

    `key` is what the rows depend on. `show` adds to an example the text classifier's opinions.
    """

    def rows(part: str, of: Iterable[Example]) -> tuple[Dataset, RowReport]:
        shown = map(show, of) if show else of
        part_key = {**key, "part": part, "rules": shared_rules()}
        return cached(folder, part_key, partial(maker.rows, shown))

    train, report = rows("train", examples)
    if not report.tokens:
        reason = report.refused[0] if report.refused else "all are skipped, held out or in dev"
        raise UserError(f"train: no example is left to train on; {reason}")
    held_out, held_report = rows("dev", examples.held_out)
    return TrainingRows(train, report, held_out, held_report)


def cached(
    folder: Path, key: Mapping[str, Any], make: Callable[[RowReport], Iterator[TrainingRow]]
) -> tuple[Dataset, RowReport]:
    """Return the rows that `make` yields, from the cache in `folder` if it has the same key.

    The first process makes the rows; the others wait for it.
    """
    entry = folder / hashlib.sha256(dump(key).encode()).hexdigest()[:16]
    file = entry / "rows.arrow"
    make_once(entry, partial(is_whole, file), partial(_write_rows, entry, make))
    report = RowReport(**read_json(entry / "report.json"))
    return Dataset.from_file(str(file)), report


END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""End of an Arrow file. Without it, rows may be missing, and Arrow does not report that."""


def is_whole(file: Path) -> bool:
    """Say whether a file of rows exists and is complete; a failing disk may leave it cut."""
    if not file.is_file() or file.stat().st_size < len(END_OF_STREAM):
        return False
    with file.open("rb") as data:
        data.seek(-len(END_OF_STREAM), os.SEEK_END)
        return data.read() == END_OF_STREAM


def _write_rows(entry: Path, make: Callable[[RowReport], Iterator[TrainingRow]]) -> None:
    """Write the rows that `make` yields, and its report, to the folder `entry`."""
    report = RowReport()
    with atomic_folder(entry) as folder:
        writer = ArrowWriter(path=str(folder / "rows.arrow"), features=FEATURES)
        for row in make(report):
            writer.write(row)
        writer.finalize()
        write_json(folder / "report.json", asdict(report))


def pack(rows: Dataset, size: int) -> Dataset:
    """Return packs of whole rows with at most `size` tokens; `seq_lengths` has the rows' lengths.

    The packs are cached like the rows, in a folder beside them. Otherwise datasets would cache them
    from all processes at once and without waiting for the disk.
    """
    [of_rows] = rows.cache_files
    entry = Path(of_rows["filename"]).parent
    entry = entry.with_name(f"{entry.name}-packs-{size}")
    file = entry / "packs.arrow"
    best_fit_decreasing = "bfd"  # splits no row

    def make() -> None:
        with atomic_folder(entry) as folder:
            cache = {"cache_file_name": str(folder / file.name), "load_from_cache_file": False}
            bare = rows.select_columns(["input_ids", "labels"])
            pack_dataset(bare, size, best_fit_decreasing, cache)

    make_once(entry, partial(is_whole, file), make)
    packs = Dataset.from_file(str(file))
    return packs.add_column("length", [sum(sizes) for sizes in packs["seq_lengths"]])


def count_examples(rows: Dataset) -> int:
    """Return the number of examples in rows or packs."""
    if "seq_lengths" not in rows.column_names:
        return len(rows)
    return sum(map(len, rows["seq_lengths"]))


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch padded on the right; `tokens` is the number of its tokens without padding.

    `reply_labels`, [reply tokens], has the ids of all tokens with loss, and `reply_places` where
    each is predicted, as an index into all places of the batch. They are found here because a GPU
    would have to wait: how many there are decides the size of what follows.

    The batch has no attention mask. Attention is causal, so no real token sees the padding, and
    kernels are fastest without a mask. In packed rows, positions restart at each example. From
    these positions transformers builds a mask, so that no example sees another.
    """
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    batch: dict[str, Any] = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "tokens": sum(map(len, ids)),
    }
    # A token is predicted at the place before it. The last place of a row predicts nothing.
    predicted = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    [batch["reply_places"]] = (predicted != IGNORED).nonzero(as_tuple=True)
    batch["reply_labels"] = predicted[batch["reply_places"]]
    if "seq_lengths" in rows[0]:
        width = batch["input_ids"].shape[1]
        batch["position_ids"] = torch.stack([positions(row["seq_lengths"], width) for row in rows])
    return batch


def collate_segments(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch with the segments for `packed_attention`: the examples, then the padding."""
    batch = collate(rows)
    width = batch["input_ids"].shape[1]
    sizes: list[int] = []
    for row in rows:
        examples = row.get("seq_lengths") or [len(row["input_ids"])]
        sizes += [*examples, width - sum(examples)]
    starts, longest = segments([size for size in sizes if size])
    return {**batch, "cu_seq_lens_q": starts, "max_length_q": longest}


def positions(sizes: Sequence[int], width: int) -> Tensor:
    """Return 0, 1, … for each of `sizes`, and again for the padding: 2, 1 up to 5 -> 0 1 0 0 1."""
    return torch.cat([torch.arange(size) for size in (*sizes, width - sum(sizes))])
