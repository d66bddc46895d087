"""What a process needs to answer the cases of a run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from panjue.eval.opinions import Advisor, load_advisor
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.run import Run
from panjue.prompts.task import Task, configured, load_task
from panjue.serve.ask import Asker, Sampling
from panjue.serve.engine import check_engine, check_sampling
from panjue.serve.merge import Served, served_model
from panjue.serve.settings import GenerateConfig, task_name


@dataclass(frozen=True)
class Job:
    """What any process needs to answer cases of a run."""

    config: GenerateConfig
    run: Path
    task_name: str
    # Of the training; an endpoint may have none.
    trained: Path | None = None
    max_tokens: int = 0
    opinions: bool = False  # whether prompts show the text classifier's
    labels: Labels = field(default_factory=Labels)
    solve: dict[str, Any] = field(default_factory=dict)  # of training, then of `config`
    served: Served | None = None  # the model to load

    @property
    def task(self) -> Task:
        """Return the task with the settings of this run."""
        return configured(load_task(self.task_name), self.solve)

    @property
    def passes(self) -> list[Sampling]:
        """Return the sampling settings of each request of one call."""
        first = self.config.sampling
        further = {**first, "n": self.config.samples, "temperature": 1.0}
        return [first, further] if self.config.samples else [first]

    def with_model(self) -> "Job":
        """Return the job with the model to load; merges the adapter if that is wanted."""
        if self.trained is None:
            return self
        adapter = "none" if self.config.endpoint else self.config.adapter
        return replace(self, served=served_model(self.trained, adapter, self.config.base))

    def advisor(self) -> Advisor | None:
        """Return the text classifier whose opinions the prompts show; None if they show none."""
        if not self.opinions:
            return None
        assert self.trained, "opinions are those of a training"
        return load_advisor(self.trained, self.task, self.labels)

    def asker(self) -> Asker:
        """Return what makes the questions: with the tokenizer of the model, if there is one."""
        return Asker(
            self.task,
            self.labels,
            self.served and self.served.model,
            self.max_tokens,
            constrained=self.config.constrained,
            advisor=self.advisor(),
        )


def make_job(run: Run, config: GenerateConfig) -> Job:
    """Return the job of a run; the model is not chosen yet."""
    check_engine(config.engine)
    check_sampling(config.sampling)
    name = task_name(run, config)
    if config.samples and not load_task(name).answer.ranked:
        raise UserError(f"samples: {name!r} uses one reply per question; set samples=0")
    if run.result is None:
        return Job(config, run.folder, name, solve=config.solve)
    record = run.record
    return Job(
        config,
        run.folder,
        name,
        trained=run.trained,
        max_tokens=record.max_tokens,
        opinions=record.opinions,
        labels=load_labels(run.trained / "labels.json"),
        solve={**record.solve, **config.solve},
    )
