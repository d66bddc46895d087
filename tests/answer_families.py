"""Answer eight cases with each of these runs, merged and unmerged, in one process: python FILE RUN…

An engine of its own for each, as `panjue generate` starts it, would import vLLM thirty times.
"""

import gc
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from panjue.finetune.trained import open_trained
from panjue.prompts.reader import Reader
from panjue.serve.ask import Budget
from panjue.serve.engine import engine_settings
from panjue.serve.job import make_job
from panjue.serve.settings import DEFAULTS, GenerateConfig

SETTINGS = {"enforce_eager": True, "max_num_seqs": 8}


def answers(run: Path, adapter: str, cases: Path) -> dict[str, Any]:
    """Return the replies to eight cases, each with its schema, and how likely it is."""
    config = GenerateConfig.model_validate({"adapter": adapter})
    job = make_job(run, open_trained(run), config).with_model()
    assert job.served
    question_maker = job.question_maker()
    budget = Budget(job.budget.usual, job.budget.usual)
    questions = [question_maker.question(one) for one in islice(Reader(job.task).read(cases), 8)]
    # vLLM's linear attention on a CPU has no other type.
    dtype = "bfloat16" if "qwen3-next" in str(run) else "float32"
    settings = {
        **DEFAULTS,
        **SETTINGS,
        "dtype": dtype,
        **engine_settings(job.served, 0, budget),
    }
    llm = LLM(**settings)
    lora = LoRARequest("adapter", 1, str(job.served.adapter)) if job.served.adapter else None
    prompts = [TokensPrompt(prompt_token_ids=question.prompt) for question in questions]
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=question.room,
            logprobs=1,
            structured_outputs=StructuredOutputsParams(json=question.schema),
        )
        for question in questions
    ]
    try:
        outputs = llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
    replies = [output.outputs[0] for output in outputs]
    return {
        "texts": [reply.text for reply in replies],
        "schemas": [question.schema for question in questions],
        # Of whole replies: the first token is a brace in any case.
        "chances": [reply.cumulative_logprob for reply in replies],
    }


if __name__ == "__main__":
    cases, *runs = map(Path, sys.argv[1:])
    for run in runs:
        for adapter in ("merge", "lora"):
            try:
                found = answers(run, adapter, cases)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            gc.collect()
            cleanup_dist_env_and_memory()
            print("found:", json.dumps([run.name, adapter, found]), flush=True)
