"""The one rule for cases that are too long: whole sentences go, the least telling first."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump
from panjue.prompts.render import prompt_ids, reply_ids, shielded
from panjue.prompts.task import Messages, Task

SENTENCE = re.compile(
    r"(?:[^。！？；!?;\n.]++|\.(?!\s+[“‘\"'(]?[A-ZÀ-Þ]))*+"
    r"(?:[。！？；!?;\n]+[”’」』）)]*|\.\s+|$)"
)
"""A full stop of the Latin script ends a sentence where white space and a capital follow."""

CLAUSE = re.compile(r".*?(?:[，,](?!\d)|$)", re.DOTALL)
LONG = 200
"""Characters above which a sentence is cut at its commas too, where the text is read for an
`anchor`: some such texts have no full stops at all."""

GAP = "……"
"""Stands in the text where sentences were left out, so that the model and a reader can see it."""


@dataclass(frozen=True)
class Fitted:
    """An example that fits its budget, and what that took.

    Attributes:
        example: The example, its text shortened if need be.
        tokens: Tokens of its prompt.
        full_tokens: Tokens of the prompt before anything was left out.
        dropped: Sentences left out.
        fits: False when even the sentences that introduce the names exceed the budget; `example`
            is then as short as the rule allows, and the caller must refuse it by name.
    """

    example: Example
    tokens: int
    full_tokens: int
    dropped: int
    fits: bool


def fit(example: Example, budget: int, count: Callable[[Example], int]) -> Fitted:
    """Shorten `example.text` until its prompt has at most `budget` tokens.

    Sentences that name nobody go first, those that share least with `example.anchor` before the
    others, from the middle outwards; then the longest of those that name somebody. The first
    sentence that names each of `example.names` always stays. Where none names anybody (masked
    names differ) the beginning stays, or with an anchor what shares most with it: no text is left
    empty. Training and serving call this with the same budget, so that a model sees in use what it
    saw in training. It reads neither the answer nor the labels.

    Args:
        example: Any example.
        budget: Largest number of prompt tokens.
        count: Tokens of the prompt of an example.
    """
    full = count(example)
    if full <= budget:
        return Fitted(example, full, full, 0, fits=True)
    sentences = split_sentences(example.text, LONG if example.anchor else None, example.names)
    victims = leaving_order(sentences, example.names, example.anchor)
    # Tokens fall with every sentence that leaves, so the fewest that must go are found by halving.
    low, high = 1, len(victims)
    while low < high:
        middle = (low + high) // 2
        if count(without(example, sentences, victims[:middle])) <= budget:
            high = middle
        else:
            low = middle + 1
    gone = victims[:low]
    shorter = without(example, sentences, gone) if gone else example
    tokens = count(shorter)
    return Fitted(shorter, tokens, full, len(gone), fits=tokens <= budget)


class FittedPrompt(NamedTuple):
    """The prompt of an example, shortened if need be.

    Attributes:
        fitted: The example, and what fitting it took; the whole of it where `room` alone is more
            than there is.
        messages: The prompt as chat messages.
        ids: Its token ids.
        room: Tokens kept free for the reply.
    """

    fitted: Fitted
    messages: Messages
    ids: list[int]
    room: int


def fit_prompt(
    task: Task, example: Example, labels: Labels, tokenizer: Any, max_tokens: int
) -> FittedPrompt:
    """Shorten `example` so that its prompt leaves room for its reply within `max_tokens`.

    The room is measured on the task's fallback, not on the gold answer: a case of 63 defendants
    keeps more room than one of two, and training and serving come to the same.
    """
    room = reply_room(task, example, labels, tokenizer)
    prompts: list[tuple[Messages, list[int]]] = []

    def count(shorter: Example) -> int:
        messages = shielded(tokenizer, task.ask.prompt(shorter))
        prompts[:] = [(messages, prompt_ids(tokenizer, messages))]
        return len(prompts[0][1])

    if room < max_tokens:
        fitted = fit(example, max_tokens - room, count)
    else:  # no text is short enough, and this one is left as it is
        full = count(example)
        fitted = Fitted(example, full, full, 0, fits=False)
    [(messages, ids)] = prompts
    assert len(ids) == fitted.tokens, "`fit` counts last what it returns"
    return FittedPrompt(fitted, messages, ids, room)


def reply_room(task: Task, example: Example, labels: Labels, tokenizer: Any) -> int:
    """Return the tokens kept free for the reply to `example`, whatever its answer is."""
    fallback = task.ask.decode("", example, labels).answer
    reserve = task.ask.reserve
    tokens = reserve(example) if callable(reserve) else reserve
    return tokens + len(reply_ids(tokenizer, dump(fallback))) * 3 // 2


def split_sentences(text: str, longest: int | None = None, names: Sequence[str] = ()) -> list[str]:
    """Cut `text` after its sentence ends, and sentences above `longest` at their commas.

    Never within one of `names`: John F. Kennedy is one. Joined again the parts give the text.
    """
    masked = text
    for name in sorted(names, key=len, reverse=True):
        masked = masked.replace(name, "甲" * len(name))
    parts = [
        part
        for sentence in SENTENCE.findall(masked)
        for part in (
            CLAUSE.findall(sentence) if longest and len(sentence) > longest else [sentence]
        )
    ]
    ends = list(accumulate(map(len, parts)))
    return [text[end - len(part) : end] for part, end in zip(parts, ends, strict=True) if part]


def leaving_order(sentences: Sequence[str], names: Sequence[str], anchor: str = "") -> list[int]:
    """Return the indices of the sentences that may go, the first to go first."""
    naming = [names_in(sentence, names) for sentence in sentences]
    introducing = {
        next((i for i, named in enumerate(naming) if name in named), -1) for name in names
    } - {-1}
    middle = (len(sentences) - 1) / 2
    pairs = {anchor[i : i + 2] for i in range(len(anchor) - 1)}
    shared = [sum(pair in sentence for pair in pairs) for sentence in sentences]
    nameless = sorted(
        (i for i, named in enumerate(naming) if not named),
        key=lambda i: (shared[i], abs(i - middle), i),
    )
    others = sorted(
        (i for i, named in enumerate(naming) if named and i not in introducing),
        key=lambda i: (-len(sentences[i]), i),
    )
    order = [*nameless, *others]
    if introducing:
        return order
    # The beginning stays, or what would go last; white space alone is neither.
    candidates = reversed(order) if anchor else range(len(sentences))
    kept = next((i for i in candidates if sentences[i].strip()), 0)
    return [i for i in order if i != kept]


def names_in(sentence: str, names: Sequence[str]) -> set[str]:
    """Return those of `names` that stand in `sentence`; 张某甲 does not name 张某."""
    found = set()
    for name in sorted(names, key=len, reverse=True):
        if name in sentence:
            found.add(name)
            sentence = sentence.replace(name, "\n")
    return found


def without(example: Example, sentences: Sequence[str], gone: Sequence[int]) -> Example:
    """Return `example` with the sentences `gone` replaced by one `GAP` per stretch."""
    absent = set(gone)
    kept = [
        (GAP if i - 1 not in absent else "") if i in absent else sentence
        for i, sentence in enumerate(sentences)
    ]
    return replace(example, text="".join(kept))
