"""Train LoRA on cases, answer other cases under a schema each, and score: all in one file.

    python examples/smallest.py BASE TRAIN TEST OUT

After `make score`, BASE is runs/base/model, and the cases are data/demo/train.jsonl and test.jsonl.
The settings are those of demo.yaml; tests/test_smallest.py compares all with panjue's commands.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from transformers.trainer_pt_utils import get_length_grouped_indices
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.reader import Reader, is_held_out
from panjue.prompts.render import reply_ids
from panjue.prompts.shorten import shortened_prompt
from panjue.prompts.tasks.judgment.metric import METRICS
from panjue.prompts.tasks.judgment.task import TASK

MAX_TOKENS = 2048
BATCH = 8
EPOCHS = 2
LEARNING_RATE = 2.0e-3
WARMUP_STEPS = 20
LORA = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
NO_LOSS = -100  # the label of the tokens of a prompt


def main(base: str, train: Path, test: Path, out: Path) -> tuple[list[float], dict[str, float]]:
    """Do all steps; return the loss of each training step, and the metrics."""
    cases = list(Reader(TASK).read(train))
    held_out = [case for case in cases if is_held_out(case)]  # a tenth, by the hash of the facts
    training = [case for case in cases if not is_held_out(case)]
    labels = TASK.ask.labels(training)  # the charges and articles that an answer may have
    losses = fine_tune(base, training, held_out, labels, out / "adapter")

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(out / "adapter"))
    model.merge_and_unload().save_pretrained(out / "merged")
    AutoTokenizer.from_pretrained(base).save_pretrained(out / "merged")

    cases = list(Reader(TASK).read(test))
    submission = []
    for case, reply in zip(cases, replies(out / "merged", cases, labels), strict=True):
        answer = TASK.ask.decode(reply, case, labels).answer
        submission.append(TASK.data.write(case, answer))
    lines = [json.dumps(judgments, ensure_ascii=False) + "\n" for judgments in submission]
    (out / "submission.jsonl").write_text("".join(lines), "utf-8")
    return losses, score(cases, submission)


def fine_tune(
    base: str, training: list[Example], held_out: list[Example], labels: Labels, adapter: Path
) -> list[float]:
    """Train LoRA; save the adapter of the epoch with the lowest held-out loss."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [tokens_of(case, labels, tokenizer) for case in training]
    held_out_rows = [tokens_of(case, labels, tokenizer) for case in held_out]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)  # LoRA starts with random matrices
    model = get_peft_model(model, LORA)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0)
    lengths = [len(ids) for ids, _ in rows]
    steps = EPOCHS * math.ceil(len(rows) / BATCH)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, steps)
    losses = []
    lowest = math.inf
    for epoch in range(EPOCHS):
        # Each step has rows of similar length, so that there is little padding.
        generator = torch.Generator().manual_seed(epoch)
        order = get_length_grouped_indices(lengths, BATCH, generator=generator)
        for start in range(0, len(rows), BATCH):
            batch = [rows[i] for i in order[start : start + BATCH]]
            loss = token_losses(model, batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            losses_of_cases = [token_losses(model, [row]) for row in held_out_rows]
        held_out_loss = torch.cat(losses_of_cases).mean().item()
        print(f"step {len(losses)} of {steps}: held-out loss {held_out_loss:.4f}")
        if held_out_loss < lowest:
            lowest = held_out_loss
            model.save_pretrained(adapter)
    return losses


def tokens_of(case: Example, labels: Labels, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and its reply, and their labels."""
    prompt = shortened_prompt(TASK, case, labels, tokenizer, MAX_TOKENS).ids
    reply = reply_ids(tokenizer, TASK.ask.target(case))
    return prompt + reply, [NO_LOSS] * len(prompt) + reply


def token_losses(model: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Return the loss of every reply token in these rows, [tokens]."""
    ids_BT = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    labels = [torch.tensor(labels) for _, labels in rows]
    labels_BT = pad_sequence(labels, batch_first=True, padding_value=NO_LOSS)
    logits_BTV = model(ids_BT).logits[:, :-1]  # each predicts the next token; none sees the padding
    next_BT = labels_BT[:, 1:]
    has_loss_BT = next_BT != NO_LOSS
    return cross_entropy(logits_BTV[has_loss_BT], next_BT[has_loss_BT], reduction="none")


def replies(model: Path, cases: list[Example], labels: Labels) -> list[str]:
    """Return the greedy reply to each case. It follows the schema of its case."""
    backend = {"backend": "guidance", "disable_any_whitespace": True}
    memory = {"max_model_len": MAX_TOKENS, "kv_cache_memory_bytes": 2**30, "enforce_eager": True}
    llm = LLM(str(model), dtype="float32", structured_outputs_config=backend, **memory)
    prompts = []
    sampling = []
    for case in cases:
        ids = shortened_prompt(TASK, case, labels, llm.get_tokenizer(), MAX_TOKENS).ids
        prompts.append(TokensPrompt(prompt_token_ids=ids))
        schema = StructuredOutputsParams(json=TASK.ask.schema(case, labels))
        sampling.append(SamplingParams(temperature=0, max_tokens=None, structured_outputs=schema))
    return [output.outputs[0].text for output in llm.generate(prompts, sampling)]


def score(cases: list[Example], submission: list[dict[str, Any]]) -> dict[str, float]:
    """Return the weighted mean of each metric; a case weighs log2 of its number of defendants."""
    weights = np.array([TASK.score.weight(case) for case in cases])
    pairs = [(TASK.gold(case), row) for case, row in zip(cases, submission, strict=True)]
    values = np.array([[metric(*pair) for metric in METRICS] for pair in pairs])
    means = weights @ values / weights.sum()
    return dict(zip(TASK.score.names, means.tolist(), strict=True))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    base, train, test, out = sys.argv[1:]
    print(main(base, Path(train), Path(test), Path(out))[1])
