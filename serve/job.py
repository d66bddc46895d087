"""What answers the cases of a run: an engine or an endpoint, and what makes its questions."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from panjue.prompts.model import has_classifier
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.alternatives import ALTERNATIVES
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint, PlainAsker
from panjue.serve.engine import Engine, engine, on_cpu
from panjue.serve.record import Training
from panjue.serve.settings import GenerateConfig
from panjue.serve.source import Sampling
from panjue.serve.trained import Served, served_model


@dataclass(frozen=True)
class Job:
    """What a process needs to answer cases of a run.

    Attributes:
        config: The settings of the run.
        training: What it takes from the training result.
        served: The model to load; None for an endpoint without a training result.
        passes: The sampling settings of each request of one call.
        is_quick_start: Whether `engine_arguments` has left compilation out.
    """

    config: GenerateConfig
    training: Training
    served: Served | None
    passes: list[Sampling]
    is_quick_start: bool = False

    @property
    def task(self) -> Task:
        """Return the task with the settings of this run."""
        return configured(load_task(self.config.task), self.training.solve)


MIN_COMPILED_REPLIES = 300
"""On a CPU, compiling the model takes longer than it saves on fewer replies: 30 s for a model of
0.5B, which then answers 0.1 s a reply faster (tests/bench/startup.py)."""

COMPILATION_SETTINGS = {"compilation_config", "optimization_level"}
"""Engine arguments that say how to compile, so that it is to be compiled."""


def make_job(config: GenerateConfig, task: Task, training: Training, cases: int) -> Job:
    """Return the job of a run, with the adapter merged into its base if that is asked for.

    `cases` is the number of cases of the test file, so that a run resumes as it began.
    """
    arguments = engine_arguments(config, task, cases)
    is_quick = not config.endpoint and arguments != config.engine
    config = config.model_copy(update={"engine": arguments})
    passes = sampling_passes(config, decides=decides(config, task, training))
    if training.folder is None:
        return Job(config, training, None, passes)
    adapter = "none" if config.endpoint else config.adapter
    served = served_model(training.folder, adapter, config.base)
    return Job(config, training, served, passes, is_quick)


def engine_arguments(config: GenerateConfig, task: Task, cases: int) -> dict[str, Any]:
    """Return the engine's arguments: on a CPU it is compiled only for many replies, if not set.

    The number of engines plays no part: a run may resume with another one.
    """
    replies = cases * (1 + config.samples)
    is_many = task.answer.several_calls or replies >= MIN_COMPILED_REPLIES
    if not on_cpu() or is_many or COMPILATION_SETTINGS & config.engine.keys():
        return config.engine
    return {"enforce_eager": True, **config.engine}


def decides(config: GenerateConfig, task: Task, training: Training) -> bool:
    """Say whether decoding will read alternative tokens: beside samples or a classifier."""
    answers = training.folder if config.adapter != "none" else None
    pools = answers is not None and not config.endpoint and has_classifier(answers)
    return bool(config.samples or (pools and task.answer.fields))


def sampling_passes(config: GenerateConfig, *, decides: bool) -> list[Sampling]:
    """Return the sampling settings of each request of one call; near ties need two tokens."""
    first = {"logprobs": ALTERNATIVES if decides else 2, **config.sampling}
    further = {**first, "n": config.samples, "temperature": 1.0}
    return [first, further] if config.samples else [first]


@contextmanager
def start(job: Job, task: Task) -> Iterator[tuple[Engine | Endpoint, Asker | PlainAsker]]:
    """Start the engine or a client of the endpoint, and what makes its questions."""
    config, labels, max_tokens = job.config, job.training.labels, job.training.max_tokens
    asker: Asker | PlainAsker
    if job.served is None:
        asker = PlainAsker(task, labels, max_tokens, constrained=config.constrained)
    else:
        model = job.served.model
        asker = Asker(task, labels, model, max_tokens, constrained=config.constrained)
    if config.endpoint:
        with closing(Endpoint(config.endpoint, config.sampling)) as endpoint:
            yield endpoint, asker
        return
    assert job.served, "without an endpoint, `find_training` returns a folder"
    with engine(job.served, config.engine, max_tokens, config.seed) as running:
        yield running, asker
