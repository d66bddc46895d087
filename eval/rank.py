"""Ranked lists from several replies -> one list of fixed length."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from panjue.prompts.example import Answer, Example
from panjue.prompts.labels import Labels
from panjue.prompts.task import Task


def ranked(
    task: Task, example: Example, replies: Sequence[str], labels: Labels
) -> tuple[Answer, int]:
    """Return the answer with its list ranked by votes, and how many places were filled up.

    The k-th value of a reply's list gets 1/k of a vote (reciprocal rank fusion without its
    constant); of equal values, the one that came first stays first. A list that is too short is
    filled up with the commonest labels. Without a readable reply the answer is the task's fallback.

    Args:
        task: A task whose answers are ranked.
        example: The example that was asked.
        replies: Raw replies, the greedy one first.
        labels: The labels of training, commonest first.
    """
    key, length = task.answer.ranked, task.answer.length
    decoded = [task.ask.decode(reply, example, labels) for reply in (*replies, "")]
    votes: dict[str, float] = defaultdict(float)
    for reply in decoded:
        for rank, value in enumerate(reply.answer[key] if reply.readable else (), start=1):
            votes[value] += 1 / rank
    voted = sorted(votes, key=lambda value: -votes[value])[:length]
    commonest = islice(labels.counts.get(key, ()), length)
    filled = list(dict.fromkeys([*voted, *commonest]))[:length]
    return {**decoded[0].answer, key: filled}, len(filled) - len(voted)
