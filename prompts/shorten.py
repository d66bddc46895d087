"""Shorten cases that are too long by dropping whole sentences, the least useful first.

In some tasks, a question is asked about the text: `Example.anchor`. Then sentences are the more
useful, the more they have in common with it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.names import name_places, places_in_plain
from panjue.prompts.plain import plain_text
from panjue.prompts.plumbing.files import dump
from panjue.prompts.render import neutralize_messages, prompt_ids, reply_ids
from panjue.prompts.task import Messages, Task

SENTENCE = re.compile(
    r"(?:[^。！？；!?;\n.]++|\.(?!\s+[“‘\"'(]?[A-ZÀ-Þ]))*+"
    r"(?:[。！？；!?;\n]+[”’」』）)]*|\.\s+|$)"
)
"""Pattern of a sentence. A Latin full stop ends one only before white space and a capital
letter."""

UP_TO_COMMA = re.compile(r".*?(?:[，,](?!\d)|$)", re.DOTALL)
MAX_SENTENCE_LENGTH = 200
"""In characters. If a question is asked, longer sentences are cut at their commas."""

GAP = "……"
"""Replaces dropped sentences in the text, so that the model and readers can see the gap."""


@dataclass(frozen=True)
class Shortened:
    """An example that was shortened to a budget, with counts."""

    example: Example
    tokens: int  # tokens of its prompt
    full_tokens: int  # tokens of the prompt with the whole text
    dropped: int  # number of dropped sentences
    fits: bool
    """False if even the sentences that introduce the names exceed the budget. Then `example` is as
    short as the rule allows, and the caller must refuse it by id."""


def shorten(example: Example, budget: int, count: Callable[[Example], int]) -> Shortened:
    """Shorten `example.text` until its prompt, as `count` counts, has at most `budget` tokens.

    `leaving_order` says which sentences are dropped first, and which never. Training and serving
    use the same budget, so that both see the same prompts. Only if a case still does not fit,
    serving tries again with a larger one. The answer and the labels are not read.
    """
    full = count(example)
    if full <= budget:
        return Shortened(example, full, full, 0, fits=True)
    sentences, order = sentences_to_drop(example)

    def fits(n_dropped: int) -> bool:
        return count(without(example, sentences, order[:n_dropped])) <= budget

    # Each dropped sentence lowers the count, unless it is as short as the `GAP` in its place. So
    # binary search finds the fewest, at least 1. It tests at most `len(order) - 1`; if these do not
    # suffice, it returns `len(order)`, and all are dropped.
    fewest = bisect_left(range(len(order)), True, lo=1, key=fits)
    dropped = order[:fewest]
    shorter = without(example, sentences, dropped)
    tokens = count(shorter)
    return Shortened(shorter, tokens, full, len(dropped), fits=tokens <= budget)


def sentences_to_drop(example: Example) -> tuple[list[str], list[int]]:
    """Return an example's sentences, and the indices of those to drop, the least useful first."""
    # Some texts about which a question (`anchor`) is asked have no full stops at all. Their
    # sentences are cut at commas, or the one sentence could not be shortened.
    max_length = MAX_SENTENCE_LENGTH if example.anchor else None
    sentences = split_sentences(example.text, max_length, example.names)
    return sentences, leaving_order(sentences, example.names, example.anchor)


def shortest(example: Example) -> Example:
    """Return `example` with only the sentences that `shorten` never drops."""
    sentences, order = sentences_to_drop(example)
    return without(example, sentences, order)


class ShortenedPrompt(NamedTuple):
    """The prompt of an example, shortened if necessary.

    If `room` (the tokens kept free for the reply) alone exceeds `max_tokens`, nothing is shortened.
    """

    shortened: Shortened
    messages: Messages
    ids: list[int]
    room: int


def shortened_prompt(
    task: Task, example: Example, labels: Labels, tokenizer: Any, max_tokens: int
) -> ShortenedPrompt:
    """Shorten `example` so that its prompt leaves room for its reply within `max_tokens`.

    The room depends on the answer to an empty reply, and not on the gold answer. So a case of 63
    defendants gets more room than a case of two, and training and serving get the same result.
    """
    of_empty_reply = dump(task.ask.decode("", example, labels).answer)
    reserve = task.ask.reserve
    room = reserve(example) if callable(reserve) else reserve
    # Real answers have more or longer labels.
    room += len(reply_ids(tokenizer, of_empty_reply)) * 3 // 2
    prompts: dict[str, tuple[Messages, list[int]]] = {}  # text -> its prompt, made by `count`

    def count(shorter: Example) -> int:
        messages = neutralize_messages(tokenizer, task.ask.prompt(shorter))
        ids = prompt_ids(tokenizer, messages)
        prompts[shorter.text] = (messages, ids)
        return len(ids)

    if room < max_tokens:
        shortened = shorten(example, max_tokens - room, count)
    else:  # no text would be short enough, so do not shorten it
        full = count(example)
        shortened = Shortened(example, full, full, 0, fits=False)
    messages, ids = prompts[shortened.example.text]
    return ShortenedPrompt(shortened, messages, ids, room)


def split_sentences(text: str, max_length: int | None, names: Sequence[str]) -> list[str]:
    """Cut `text` after the ends of sentences, and sentences above `max_length` at their commas.

    Names such as John F. Kennedy are never cut. A line break within a sentence does not end it. The
    parts, joined again, give the text.
    """
    plain = plain_text(text)
    masked = ""  # names without full stops, which would end sentences
    end_of_last = 0
    for start, end, _ in places_in_plain(plain.text, names):
        masked += plain.text[end_of_last:start] + "甲" * (end - start)
        end_of_last = end
    masked += plain.text[end_of_last:]
    parts: list[str] = []
    for sentence in SENTENCE.findall(masked):
        if max_length and len(sentence) > max_length:
            parts += UP_TO_COMMA.findall(sentence)
        else:
            parts.append(sentence)
    ends = [plain.old_end(end) for end in accumulate(map(len, parts))]
    # The last sentence ends with the text, even if `plain_text` has dropped its last characters.
    places = pairwise([0, *ends[:-1], len(text)])
    return [text[start:end] for start, end in places if start < end]


def named_by(sentences: Sequence[str], names: Sequence[str]) -> list[set[int]]:
    """Return for each sentence of a text the indices of the names in it."""
    ends = list(accumulate(map(len, sentences)))
    named: list[set[int]] = [set() for _ in sentences]
    for start, _, number in name_places("".join(sentences), names):
        named[bisect_right(ends, start)].add(number)
    return named


def leaving_order(sentences: Sequence[str], names: Sequence[str], anchor: str) -> list[int]:
    """Return the indices of the sentences that may be dropped, the least useful first.

    Sentences without a name come first: those with the least in common with the question `anchor`,
    and among equal ones (all, without a question) the middle of the text. Then sentences with a
    name follow, the longest first. The first sentence with each name always stays. If the text has
    no name, e.g. because they are masked, one sentence stays, so that no text becomes empty: the
    one most like the question, or without a question the beginning of the text.
    """
    nameless = []
    naming = []  # only names that earlier sentences have introduced
    introduced: set[int] = set()
    for i, names_here in enumerate(named_by(sentences, names)):
        if not names_here:
            nameless.append(i)
        elif names_here <= introduced:
            naming.append(i)
        introduced |= names_here
    pairs = {anchor[i : i + 2] for i in range(len(anchor) - 1)}  # of neighboring characters
    similarity = [sum(pair in sentence for pair in pairs) for sentence in sentences]
    middle = (len(sentences) - 1) / 2
    nameless.sort(key=lambda i: (similarity[i], abs(i - middle)))
    naming.sort(key=lambda i: -len(sentences[i]))
    order = nameless + naming
    if introduced:
        return order
    candidates = reversed(order) if anchor else range(len(sentences))
    kept = next((i for i in candidates if sentences[i].strip()), 0)  # 0: all are blank
    return [i for i in order if i != kept]


def without(example: Example, sentences: Sequence[str], dropped: Sequence[int]) -> Example:
    """Return `example` without the sentences `dropped`; one `GAP` replaces neighboring ones."""
    absent = set(dropped)
    parts = []
    for i, sentence in enumerate(sentences):
        if i not in absent:
            parts.append(sentence)
        elif i - 1 not in absent:
            parts.append(GAP)
    return replace(example, text="".join(parts))
