"""What a process needs to answer the cases of a run."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from panjue.eval.opinions import load_advisor
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.run import Run, RunRecord
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.ask import LONGEST, Asker, Budget, Sampling
from panjue.serve.engine import check_engine, check_sampling
from panjue.serve.merge import Served, served_model
from panjue.serve.settings import GenerateConfig, task_name


def trained_asker(
    trained: Path, task: Task, model: Path | None, budget: Budget, *, constrained: bool = True
) -> Asker:
    """Return what asks the model of a training and knows its labels and its text classifier."""
    labels = load_labels(trained / "labels.json")
    advisor = load_advisor(trained, task, labels)
    if advisor:
        advisor = replace(advisor, in_prompts=RunRecord.read(trained).opinions)
    return Asker(task, labels, model, budget, constrained=constrained, advisor=advisor)


@dataclass(frozen=True)
class Job:
    """What any process needs to answer cases of a run."""

    config: GenerateConfig
    run: Path
    task_name: str
    # Of the training; an endpoint may have none.
    trained: Path | None = None
    budget: Budget = field(default_factory=Budget)
    solve: dict[str, Any] = field(default_factory=dict)  # of training, then of `config`
    served: Served | None = None  # the model to load

    @property
    def task(self) -> Task:
        return configured(load_task(self.task_name), self.solve)

    @cached_property
    def labels(self) -> Labels:
        return load_labels(self.trained / "labels.json") if self.trained else Labels()

    @property
    def passes(self) -> list[Sampling]:
        first = self.config.sampling
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
        model = self.served and self.served.model
        constrained = self.config.constrained
        if self.trained is None:
            return Asker(self.task, self.labels, constrained=constrained)
        return trained_asker(self.trained, self.task, model, self.budget, constrained=constrained)


def make_job(run: Run, config: GenerateConfig) -> Job:
    """Return the job of a run; the model is not chosen yet."""
    check_engine(config.engine)
    check_sampling(config.sampling)
    name = task_name(run, config)
    if config.samples and not load_task(name).ranking:
        raise UserError(f"samples: {name!r} uses one reply per question; set samples=0")
    if run.result is None:
        return Job(config, run.folder, name, solve=config.solve)
    record = run.record
    return Job(
        config,
        run.folder,
        name,
        trained=run.trained,
        budget=Budget(record.max_tokens, max(record.max_tokens, LONGEST)),
        solve={**record.solve, **config.solve},
    )
