"""The task's metrics on held-out examples during training."""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor
from transformers import StoppingCriteria

from panjue.eval.means import ScoreTable, metric_values, summarize
from panjue.prompts.example import Example
from panjue.prompts.fit import fit_prompt
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.progress import LINE_EVERY_S
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task

MAX_BATCH_TOKENS = 2**15
"""Tokens of one batch, padding and replies included: 5 GB of attention cache for an 8B model."""


@dataclass(frozen=True)
class Question:
    """A held-out example with its prompt.

    Attributes:
        prompt: Token ids; empty if the example is too long, which serving refuses too.
        room: Maximum number of reply tokens.
    """

    example: Example
    prompt: list[int]
    room: int


class HeldOutScore:
    """Answers a fixed sample of held-out examples greedily and scores the answers.

    Decoding is not constrained by the schema, as it is in serving: a model that knows the format
    does not need the schema, and the score should show if it does not. The task's fallback answers
    unreadable replies, as everywhere.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        labels: Labels,
        examples: Iterable[Example],
        *,
        size: int,
        max_tokens: int,
    ) -> None:
        """Choose `size` of `examples` by the hash of their text and build their prompts."""
        self._task, self._tokenizer, self._labels = task, tokenizer, labels
        chosen = heapq.nsmallest(size, examples, key=text_hash)
        self.questions = list(self._questions(chosen, max_tokens))

    def _questions(self, examples: Iterable[Example], max_tokens: int) -> Iterator[Question]:
        for example in examples:
            prompt = fit_prompt(self._task, example, self._labels, self._tokenizer, max_tokens)
            yield Question(example, prompt.ids if prompt.fitted.fits else [], prompt.room)

    def __call__(self, trainer: Any) -> dict[str, float]:
        """Return the task's metrics; the questions are divided among the processes."""
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        share = self.questions[rank::world]
        scored = [self._values(question.example, "") for question in share if not question.prompt]
        for batch in batches([question for question in share if question.prompt]):
            replies = self._replies(trainer, batch)
            scored += [self._values(q.example, r) for q, r in zip(batch, replies, strict=True)]
        weights, values = zip(*gather_object(scored), strict=True)
        table = ScoreTable(self._task, weights=list(weights), values=list(values))
        return summarize(table, resamples=0).mean

    def _values(self, example: Example, reply: str) -> tuple[float, Any]:
        """Return the example's weight and the metrics of its reply."""
        task = self._task
        row = task.data.write(example, task.ask.decode(reply, example, self._labels).answer)
        values = metric_values(task, task.gold(example), row, f"held out: id {example.id}")
        return task.score.weight(example), values

    @torch.no_grad()
    def _replies(self, trainer: Any, batch: Sequence[Question]) -> list[str]:
        pad = self._tokenizer.eos_token_id  # any token: the attention mask hides it
        width = max(len(question.prompt) for question in batch)
        ids = torch.tensor([[pad] * (width - len(q.prompt)) + q.prompt for q in batch])
        mask = torch.tensor([[0] * (width - len(q.prompt)) + [1] * len(q.prompt) for q in batch])
        model = trainer.accelerator.unwrap_model(trainer.model)
        console = Console(quiet=not trainer.is_world_process_zero(), soft_wrap=True)
        with trainer.compute_loss_context_manager():
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max(question.room for question in batch),
                do_sample=False,
                pad_token_id=pad,
                eos_token_id=pad,
                use_cache=True,
                stopping_criteria=[TokenCounter(console, len(batch))],
            )
        texts: list[str] = self._tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        return texts


class TokenCounter(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped to mypy
    """Shows how far the replies of a batch are, with a line now and then; never stops them."""

    def __init__(self, console: Console, replies: int) -> None:
        """Count the tokens of `replies` replies that are written together."""
        self._console, self._replies = console, replies
        self._tokens, self._last_line = 0, time.monotonic()

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Count one token of every reply."""
        self._tokens += 1
        if time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(
                f"scoring {self._replies} held-out answers, {self._tokens} tokens each so far",
                highlight=False,
            )
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def batches(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Yield batches of at most `MAX_BATCH_TOKENS`, with replies of similar length together.

    A batch takes little longer than its longest reply alone.
    """
    batch: list[Question] = []
    for question in sorted(questions, key=lambda q: (q.room, len(q.prompt))):
        longest = max(len(q.prompt) + q.room for q in [*batch, question])
        if batch and longest * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch
