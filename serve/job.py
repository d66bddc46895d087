"""What answers the cases of a run: an engine or an endpoint, and what makes its questions."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from panjue.prompts.plumbing.model import has_classifier
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.alternatives import ALTERNATIVES
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint, PlainAsker
from panjue.serve.engine import Engine, engine
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
    """

    config: GenerateConfig
    training: Training
    served: Served | None

    @property
    def task(self) -> Task:
        """Return the task with the settings of this run."""
        return configured(load_task(self.config.task), self.training.solve, self.config.folder)

    @property
    def passes(self) -> list[Sampling]:
        """Return the sampling settings of each request of one call; near ties need two tokens."""
        logprobs = ALTERNATIVES if self._decides else 2
        first = {"logprobs": logprobs, **self.config.sampling}
        further = {**first, "n": self.config.samples, "temperature": 1.0}
        return [first, further] if self.config.samples else [first]

    @property
    def _decides(self) -> bool:
        """Say whether decoding will read alternative tokens: beside samples or a classifier."""
        if self.config.samples:
            return True
        trained = self.training.folder
        if trained is None or self.config.adapter == "none" or self.config.endpoint:
            return False
        return bool(self.task.answer.fields) and has_classifier(trained)


def make_job(config: GenerateConfig, training: Training) -> Job:
    """Return the job of a run, with the adapter merged into its base if that is asked for."""
    if training.folder is None:
        return Job(config, training, None)
    adapter = "none" if config.endpoint else config.adapter
    return Job(config, training, served_model(training.folder, adapter, config.base))


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
