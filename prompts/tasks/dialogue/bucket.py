"""The event bucket: the events of a dialogue so far, updated while a window slides over it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from panjue.prompts.example import Turn
from panjue.prompts.shorten import GAP
from panjue.prompts.tasks.dialogue.similarity import Similarity

OTHER = "其他"
"""The event of a sentence without a named event."""

MAX_SENTENCE_LENGTH = 40
"""Maximum characters of a sentence in an event's account, which is a summary, no transcript."""


def windows(sentences: int, size: int, step: int) -> Iterator[tuple[range, range]]:
    """Yield (seen, new) for every window over sentences 0, 1, …; each is new exactly once.

    The first window has `size` new sentences. Each later one has the last `size - step` seen
    sentences and `step` new ones; 0 < step <= size.
    """
    end = min(size, sentences)
    yield range(0), range(end)
    while end < sentences:
        until = min(end + step, sentences)
        yield range(max(0, end - (size - step)), end), range(end, until)
        end = until


@dataclass
class Entry:
    """One event, with an account that grows sentence by sentence.

    Attributes:
        event: The name of the event.
        account: (sentence, its target) in the order of the dialogue.
    """

    event: str
    account: list[tuple[Turn, str]] = field(default_factory=list)

    @property
    def sentence_ids(self) -> list[int]:
        """Return the numbers of the event's sentences."""
        return [turn.number for turn, _ in self.account]

    def holders(self, until: int) -> list[str]:
        """Return the speakers of the event up to a sentence, in order."""
        holders = (turn.holder for turn, _ in self.account if turn.number <= until)
        return list(dict.fromkeys(holders))

    def description(self, until: int) -> str:
        """Return the account up to a sentence, one line per sentence.

        The account only grows at its end, so this prefix equals the account at the time of that
        sentence: no snapshots are needed.
        """
        return "".join(
            f"[{turn.number}] {turn.holder}谈{target or OTHER}：{_short(turn.sentence)}\n"
            for turn, target in self.account
            if turn.number <= until
        )


def _short(sentence: str) -> str:
    sentence = " ".join(sentence.split())
    too_long = len(sentence) > MAX_SENTENCE_LENGTH
    return sentence[:MAX_SENTENCE_LENGTH] + GAP if too_long else sentence


class Bucket:
    """The events of one dialogue, each sentence in exactly one of them."""

    def __init__(self, similar: Similarity, same_event: float) -> None:
        """Start empty; names with a similarity of at least `same_event` are one event."""
        self.entries: list[Entry] = []
        self._similar, self._same_event = similar, same_event
        self._entry_of: dict[int, Entry] = {}

    def add(self, turn: Turn, target: str, event: str) -> Entry:
        """Add a sentence to the event with the same or the most similar name, or to a new event."""
        assert turn.number not in self._entry_of, f"sentence {turn.number} is already added"
        event = " ".join(event.split()) or OTHER
        entry = self._find(event)
        if entry is None:
            entry = Entry(event)
            self.entries.append(entry)
        entry.account.append((turn, target))
        self._entry_of[turn.number] = entry
        return entry

    def of(self, number: int) -> Entry:
        """Return the event of a sentence."""
        return self._entry_of[number]

    def _find(self, event: str) -> Entry | None:
        names = [entry.event for entry in self.entries]
        if event in names:
            return self.entries[names.index(event)]
        if not names:
            return None
        cosines = self._similar([event], names)[0]
        best = int(cosines.argmax())
        return self.entries[best] if cosines[best] >= self._same_event else None
