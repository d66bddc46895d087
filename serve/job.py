"""What a process needs to answer cases: the driver, or a replica in a cluster."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panjue.finetune.trained import Trained
from panjue.prompts.gpu import check_gpu
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import Task, load_task
from panjue.serve.ask import LONGEST, Budget, QuestionMaker, Sampling
from panjue.serve.settings import GenerateConfig

if TYPE_CHECKING:
    from panjue.serve.merge import Served


@dataclass(frozen=True)
class Job:
    """What to ask, how, and which model. The driver sends it to replicas, which load the model."""

    config: GenerateConfig
    run: Path  # the run folder, into which the answers are written
    trained: Trained | None  # the training in it; None for an endpoint without a training
    task_name: str
    budget: Budget = field(default_factory=Budget)  # of the training, if there is one
    solve: dict[str, Any] = field(default_factory=dict)  # settings of the task's steps, if any
    served: "Served | None" = None  # the model to load; for an endpoint, only its tokenizer

    @property
    def task(self) -> Task:
        """Return the task. If it takes several calls for an example, `solve` sets how."""
        return load_task(self.task_name, self.solve)

    @property
    def labels(self) -> Labels:
        """Return the label sets of the training, or else those that the task itself lists."""
        labels = self.trained.labels if self.trained else self.task.closed_labels
        assert labels is not None, "checked with the settings"
        return labels

    @property
    def passes(self) -> list[Sampling]:
        """Return the sampling of each question: for the first reply, then for all `samples`.

        The samples are further replies. A task with ranked answers lets them vote.
        """
        first = self.config.sampling
        further = {**first, "n": self.config.samples, "temperature": 1.0}
        return [first, further] if self.config.samples else [first]

    def check_engine(self) -> None:
        """Refuse settings that vLLM does not have. This imports vLLM, which takes ten seconds."""
        if self.config.answer == "classifier" or self.config.endpoint:  # these need no engine here
            return
        if not self.config.ray:  # its replicas see their own GPUs
            check_gpu(answering=True)
        from panjue.serve.engine import check_engine, check_sampling

        check_engine(self.config.engine)
        check_sampling(self.config.sampling, self.config.engine)

    def with_model(self) -> "Job":
        """Return the job with the model to load; merge the adapter if the settings say so."""
        if self.trained is None:
            return self
        from panjue.serve.merge import served_model  # takes seconds, as torch does

        # An endpoint's questions need only the tokenizer, which the base has.
        adapter = "none" if self.config.endpoint else self.config.adapter
        return replace(self, served=served_model(self.trained, adapter, self.config.base))

    def question_maker(self) -> QuestionMaker:
        """Return the maker of questions of a job that `with_model` has returned."""
        model = self.served.model if self.served else None
        constrained = self.config.constrained
        return QuestionMaker(self.task, self.trained, model, self.budget, constrained=constrained)


def make_job(run: Path, trained: Trained | None, config: GenerateConfig) -> Job:
    """Return the job of a run folder and its training, without the model to load."""
    if trained is None:
        assert config.task, "checked with the settings"
        job = Job(config, run, None, config.task, solve=config.solve)
    else:
        record = trained.record
        budget = Budget(usual=record.max_tokens, longest=max(record.max_tokens, LONGEST))
        job = Job(config, run, trained, record.task, budget, {**record.solve, **config.solve})
    if config.samples and not job.task.ranking:
        raise UserError(f"samples: {job.task_name!r} uses one reply per question; set samples=0")
    return job
