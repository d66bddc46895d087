"""The task's metrics on held-out examples during training."""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console

from panjue.eval.values import score_answers
from panjue.finetune.data import RowMaker
from panjue.prompts.example import Answer, Example
from panjue.prompts.plumbing.progress import LINE_EVERY_S
from panjue.prompts.reader import text_hash
from panjue.prompts.shorten import shortened_prompt

MAX_BATCH_TOKENS = 2**17
"""Tokens of one batch, padding and replies included: 20 GB of attention cache for an 8B model."""

CPU_BATCH_TOKENS = 2**15


def batch_tokens(config: Any) -> int:
    """Return the tokens whose attention cache takes half of a GPU's free memory, or the limit."""
    if not torch.cuda.is_available():
        return CPU_BATCH_TOKENS
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    free -= torch.cuda.memory_allocated()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Keys and values of each layer, two bytes a number.
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    each = 4 * config.num_hidden_layers * heads * width
    return int(min(MAX_BATCH_TOKENS, free // 2 // each))


@dataclass(frozen=True)
class Question:
    """A held-out example with the token ids of its prompt and the room for a reply, in tokens.

    The prompt is empty if the example is too long, which serving refuses too.
    """

    example: Example
    prompt: list[int]
    room: int


class HeldOut:
    """Answers a fixed sample of held-out examples greedily and scores the answers.

    Decoding is not constrained by the schema, as it is in serving: a model that knows the format
    does not need the schema, and the score should show if it does not. The task's fallback answers
    unreadable replies, as everywhere. The metric `headline` chooses the best adapter.
    """

    def __init__(
        self, maker: RowMaker, examples: Iterable[Example], size: int, console: Console
    ) -> None:
        """Choose `size` of `examples` by the hash of their text; `console` shows the progress."""
        self._task, self._tokenizer, self._labels = maker.task, maker.tokenizer, maker.labels
        self._console, self.headline = console, self._task.score.names[-1]
        chosen = heapq.nsmallest(size, examples, key=text_hash)
        self.questions = [_question(maker, example) for example in chosen]

    def __call__(self, trainer: Any) -> dict[str, float]:
        """Return the task's metrics; the processes divide each batch among them."""
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        refused = [question for question in self.questions if not question.prompt]
        answers = [self._answer(question, "") for question in refused[rank::world]]
        done, last_line = len(refused), time.monotonic()
        most = min(gather_object([batch_tokens(trainer.model.config.get_text_config())])) * world
        for batch in batches([q for q in self.questions if q.prompt], most):
            share = batch[rank::world]
            # Where weights are sharded, a process without a share has to gather them too.
            asked = share or (batch[:1] if trainer.is_fsdp_enabled else [])
            if time.monotonic() - last_line >= LINE_EVERY_S:
                last_line = time.monotonic()
                self._console.print(f"scoring: {done} of {len(self.questions)} held-out cases done")
            replies = self._replies(trainer, asked) if asked else []
            answers += [self._answer(q, reply) for q, reply in zip(share, replies, strict=False)]
            done += len(batch)
        return score_answers(self._task, gather_object(answers))

    def _answer(self, question: Question, reply: str) -> tuple[Example, Answer]:
        example = question.example
        return example, self._task.ask.decode(reply, example, self._labels).answer

    def _replies(self, trainer: Any, batch: Sequence[Question]) -> list[str]:
        """Return the replies; where memory is short, those of half a batch at a time."""
        try:
            return self._generate(trainer, batch)
        except torch.OutOfMemoryError:
            # Processes that share weights have to decode the same batches.
            if len(batch) == 1 or trainer.is_fsdp_enabled:
                raise
        torch.accelerator.empty_cache()
        half = len(batch) // 2
        return self._replies(trainer, batch[:half]) + self._replies(trainer, batch[half:])

    @torch.no_grad()
    def _generate(self, trainer: Any, batch: Sequence[Question]) -> list[str]:
        pad = self._tokenizer.eos_token_id  # any token: the attention mask hides it
        width = max(len(question.prompt) for question in batch)
        ids = torch.tensor([[pad] * (width - len(q.prompt)) + q.prompt for q in batch])
        mask = torch.tensor([[0] * (width - len(q.prompt)) + [1] * len(q.prompt) for q in batch])
        model = trainer.accelerator.unwrap_model(trainer.model)
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(question.room for question in batch),
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=pad,
            use_cache=True,
            synced_gpus=trainer.is_fsdp_enabled,
        )
        texts: list[str] = self._tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        return texts


def kept_score(trainer: Any) -> str:
    """Return the held-out score of the kept weights and how it came about; empty if unknown."""
    state, held_out = trainer.state, trainer.held_out
    kept = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    entries = [row for row in state.log_history if row["step"] == kept and "eval_loss" in row]
    if not entries:
        return ""
    if held_out is None:
        count = len(trainer.eval_dataset)
        return f" (loss {entries[-1]['eval_loss']:.4f} on {count} held-out cases)"
    value = entries[-1][f"eval_{held_out.headline}"]
    return (
        f" ({held_out.headline} {value:.4f} on {len(held_out.questions)} held-out cases, free "
        "replies without the schema; `panjue score` scores all cases, decoded under the schema)"
    )


def batches(questions: Sequence[Question], max_tokens: int) -> Iterator[list[Question]]:
    """Yield batches of at most `max_tokens`, with replies of similar length together.

    A batch takes little longer than its longest reply alone.
    """
    batch: list[Question] = []
    for question in sorted(questions, key=lambda q: (q.room, len(q.prompt))):
        longest = max(len(q.prompt) + q.room for q in [*batch, question])
        if batch and longest * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def _question(maker: RowMaker, example: Example) -> Question:
    short, _, prompt, room = shortened_prompt(
        maker.task, example, maker.labels, maker.tokenizer, maker.max_tokens
    )
    return Question(example, prompt if short.fits else [], room)
