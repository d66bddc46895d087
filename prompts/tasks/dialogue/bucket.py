"""The event bucket: what a dialogue has been about so far, kept while a window slides over it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from panjue.prompts.example import Turn
from panjue.prompts.fit import GAP
from panjue.prompts.tasks.dialogue.similarity import Similarity

OTHER = "其他"
"""The event of a sentence for which none is named."""

NOTE = 40
"""Characters of a sentence in an event's account: it says how things went, it is no transcript."""


def windows(sentences: int, size: int, step: int) -> Iterator[tuple[range, range]]:
    """Yield (seen, new) for every window over sentences 0, 1, …; each is new exactly once.

    The first window brings `size` sentences, each later one `step` new ones after the last
    `size - step` that were seen; 0 < step <= size.
    """
    end = min(size, sentences)
    yield range(0), range(end)
    while end < sentences:
        until = min(end + step, sentences)
        yield range(max(0, end - (size - step)), end), range(end, until)
        end = until


@dataclass
class Entry:
    """One event, with a running account that grows sentence by sentence.

    Attributes:
        event: Its name.
        account: (who said what in which place, about what) in the order of the dialogue.
    """

    event: str
    account: list[tuple[Turn, str]] = field(default_factory=list)

    @property
    def sentence_ids(self) -> list[int]:
        """Return the numbers of the sentences that belong to it."""
        return [turn.number for turn, _ in self.account]

    def holders(self, until: int) -> list[str]:
        """Return who has spoken of it up to a sentence, in order."""
        told = (turn.holder for turn, _ in self.account if turn.number <= until)
        return list(dict.fromkeys(told))

    def description(self, until: int) -> str:
        """Return the account up to a sentence, one line for each.

        As it only ever grows at its end, this is what stood there right after the window that
        brought the sentence, less what comes after it: no snapshots need to be kept.
        """
        return "".join(
            f"[{turn.number}] {turn.holder}谈{target or OTHER}：{_short(turn.sentence)}\n"
            for turn, target in self.account
            if turn.number <= until
        )


def _short(sentence: str) -> str:
    sentence = " ".join(sentence.split())
    return sentence if len(sentence) <= NOTE else sentence[:NOTE] + GAP


class Bucket:
    """The events of one dialogue, each sentence in exactly one of them."""

    def __init__(self, similar: Similarity, same_event: float) -> None:
        """Begin with none; names that are at least `same_event` alike are one event."""
        self.entries: list[Entry] = []
        self._similar, self._same_event = similar, same_event
        self._of: dict[int, Entry] = {}

    def add(self, turn: Turn, target: str, event: str) -> Entry:
        """Put a sentence into the event that is called so or most like it, or into a new one."""
        assert turn.number not in self._of, f"sentence {turn.number} is there already"
        event = " ".join(event.split()) or OTHER
        entry = self._find(event)
        if entry is None:
            entry = Entry(event)
            self.entries.append(entry)
        entry.account.append((turn, target))
        self._of[turn.number] = entry
        return entry

    def of(self, number: int) -> Entry:
        """Return the event that a sentence belongs to."""
        return self._of[number]

    def _find(self, event: str) -> Entry | None:
        names = [entry.event for entry in self.entries]
        if event in names:
            return self.entries[names.index(event)]
        if not names:
            return None
        alike = self._similar([event], names)[0]
        best = int(alike.argmax())
        return self.entries[best] if alike[best] >= self._same_event else None
