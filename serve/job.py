"""What a process needs to answer the cases of a run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.run import ANSWERS, Run
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.ask import ALTERNATIVES, Asker, Sampling
from panjue.serve.engine import check_engine, check_sampling
from panjue.serve.merge import Served, served_model
from panjue.serve.settings import GenerateConfig, task_name


@dataclass(frozen=True)
class Job:
    """What any process needs to answer cases of a run."""

    config: GenerateConfig
    folder: Path  # of the answers
    task_name: str
    # Of the training; an endpoint may have none.
    trained: Path | None = None
    max_tokens: int = 0
    labels: Labels = field(default_factory=Labels)
    solve: dict[str, Any] = field(default_factory=dict)  # of training, then of `config`
    served: Served | None = None  # the model to load

    @property
    def task(self) -> Task:
        """Return the task with the settings of this run."""
        return configured(load_task(self.task_name), self.solve)

    @property
    def decides(self) -> bool:
        """Say whether decoding will read alternative tokens: beside samples or a classifier."""
        config = self.config
        answers = self.trained if config.adapter != "none" and not config.endpoint else None
        pools = answers is not None and has_classifier(answers)
        return bool(config.samples or (pools and self.task.answer.fields))

    @property
    def passes(self) -> list[Sampling]:
        """Return the sampling settings of each request of one call; near ties need two tokens."""
        first = {"logprobs": ALTERNATIVES if self.decides else 2, **self.config.sampling}
        further = {**first, "n": self.config.samples, "temperature": 1.0}
        return [first, further] if self.config.samples else [first]

    def with_model(self) -> "Job":
        """Return the job with the model to load; merges the adapter if that is wanted."""
        if self.trained is None:
            return self
        adapter = "none" if self.config.endpoint else self.config.adapter
        return replace(self, served=served_model(self.trained, adapter, self.config.base))

    def asker(self) -> Asker:
        """Return what makes the questions: with the tokenizer of the model, if there is one."""
        model, constrained = self.served and self.served.model, self.config.constrained
        return Asker(self.task, self.labels, model, self.max_tokens, constrained=constrained)


def make_job(run: Run, test: Path, config: GenerateConfig) -> Job:
    """Return the job of a run; the model is not chosen yet."""
    check_engine(config.engine)
    check_sampling(config.sampling)
    name = task_name(run, config)
    if config.samples and not load_task(name).answer.uses_samples:
        raise UserError(f"samples: {name!r} uses one reply per question; set samples=0")
    folder = run.folder / ANSWERS / (config.answers or test.stem)
    if run.result is None:
        return Job(config, folder, name, solve=config.solve)
    record, labels = run.record, load_labels(run.trained / "labels.json")
    solve = {**record.solve, **config.solve}
    return Job(config, folder, name, run.trained, record.max_tokens, labels, solve)
