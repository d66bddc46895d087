"""The choice of training and held-out examples; each data file is read once."""

import heapq
import pickle
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile

from panjue.finetune.settings import SftConfig
from panjue.prompts.columns import answer_column, named_columns
from panjue.prompts.example import Example
from panjue.prompts.names import NameCount
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.reader import Reader, is_held_out, text_hash
from panjue.prompts.task import Task


class Spool:
    """Examples in a file without a name, since a million would fill the memory of every process."""

    def __init__(self, folder: Path) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115
        self._size = 0
        weakref.finalize(self, self._file.close)  # else Python would warn at its end

    def __len__(self) -> int:
        return self._size

    def append(self, example: Example) -> None:
        pickle.dump(example, self._file)
        self._size += 1

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples in order; one iteration at a time."""
        self._file.seek(0)
        for _ in range(self._size):
            yield pickle.load(self._file)


class Examples:
    """The examples of a training: `train`, `held_out` (`dev`, or a tenth of `train`), `mixable`.

    `mixable` are the cases of the file `mix`. Of these, the model is trained on `mix_ratio` for
    each case of `train`; the text classifier may see all. Several files may have the same facts; a
    text that is held out is never trained on. With `limit`, each has at most the first `limit`.
    """

    def __init__(self, config: SftConfig, reader: Reader) -> None:
        """Read the files of the config, and divide their cases.

        Held out are the cases of `dev`, or without one a tenth of `train`, chosen by the hashes of
        their texts. Without a limit, `limit` is None, which no number of cases equals.
        """
        config.run.mkdir(parents=True, exist_ok=True)
        self.reader = reader
        self.train = Spool(config.run)
        self.held_out = Spool(config.run)
        self.mixable = Spool(config.run)  # cases of the file `mix`; see `__iter__`
        self.names = NameCount()  # names in all files, and those that the facts do not have
        self.dropped = 0  # cases of `train`, as far as it is read, that `dev` has too
        limit = config.limit
        for example in islice(self._read(config.dev), limit):
            self.held_out.append(example)
        in_dev = set(map(text_hash, self.held_out)) if config.dev else None
        for example in self._read(config.train):
            if is_held_out(example, in_dev=in_dev):
                if config.dev:
                    self.dropped += 1
                elif len(self.held_out) != limit:
                    self.held_out.append(example)
            elif len(self.train) != limit:
                self.train.append(example)
            has_held_out = config.dev or len(self.held_out) == limit
            if len(self.train) == limit and has_held_out:  # no further case is needed
                break
        hashes = []
        for example in self._read(config.mix):
            if not is_held_out(example, in_dev=in_dev):
                self.mixable.append(example)
                hashes.append(text_hash(example))
            if len(self.mixable) == limit:
                break
        # `mix_ratio` decides how many of them are trained on. Those with the lowest hashes are a
        # random choice. Equal texts have equal hashes, so a few more may be chosen.
        chosen = heapq.nsmallest(round(config.mix_ratio * len(self.train)), hashes)
        self._highest_chosen = chosen[-1] if chosen else ""
        self.mixed_size = sum(one <= self._highest_chosen for one in hashes)

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples to train on: those of `train`, then those chosen from `mix`.

        Chosen from `mix` are the cases whose text has a hash of at most `_highest_chosen`.
        """
        yield from self.train
        for example in self.mixable:
            if text_hash(example) <= self._highest_chosen:
                yield example

    def _read(self, path: Path | None) -> Iterator[Example]:
        """Yield the examples of a file, and count their names. Each of them needs an answer."""
        if path is None:
            return
        for example in self.names.of(self.reader.read(path)):
            if example.answer is None:
                columns = named_columns(self.reader.columns_of(path, example.id))
                name = answer_column(self.reader.task.data)
                way_out = "use a training file"
                if name:
                    way_out += f", or say which column has the answer: columns.{name}=COLUMN"
                raise UserError(
                    f"{path}: id {example.id} has no answer to learn from, but {columns}; {way_out}"
                )
            yield example


def check_files(training: RunRecord) -> None:
    """Refuse a training if one of its files of cases is missing, or was changed since."""
    files = {
        training.train: training.train_sha256,
        training.dev: training.dev_sha256,
        training.mix: training.mix_sha256,
    }
    for name, digest in files.items():
        if name and not (Path(name).exists() and sha256(Path(name)) == digest):
            raise UserError(f"{name} is missing, or was changed since the training")


def trained_on(training: RunRecord, task: Task) -> Iterator[Example]:
    """Yield the cases that the model or the text classifier of a training was fitted on."""
    reader = Reader(
        task,
        columns=training.columns,
        on_bad_row=training.on_bad_row,
        split_by=training.split_by,
    )
    in_dev = None
    if training.dev:
        in_dev = set(map(reader.hash_of, islice(reader.read(Path(training.dev)), training.limit)))
    for path in filter(None, (training.train, training.mix)):
        examples = reader.read(Path(path))
        kept = (one for one in examples if not is_held_out(one, training.split_by, in_dev))
        yield from islice(kept, training.limit)
