"""The parts of `panjue serve`: model, prompts, decision rule, law texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panjue.eval.decide import Decider, fitted_decider
from panjue.prompts.labels import load_labels
from panjue.prompts.model import is_demo
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.task import load_task
from panjue.serve.ask import Asker
from panjue.serve.judge import Judge
from panjue.serve.judgments import Judgments
from panjue.serve.law import read_law
from panjue.serve.settings import ServeConfig, trained_folder
from panjue.serve.source import Source
from panjue.serve.trained import Served, served_model


@dataclass(frozen=True)
class Service:
    """The parts of a server.

    Attributes:
        config: The settings.
        asker: Turns examples into questions.
        decider: Decides answers; None if the task has none.
        law: Article -> its text, to show with the label.
        served: Folders of the model and of its adapter.
    """

    config: ServeConfig
    asker: Asker
    decider: Decider | None
    law: Mapping[str, str]
    served: Served

    @property
    def max_tokens(self) -> int:
        """Return the limit on prompt plus reply."""
        return self.asker.max_tokens

    @property
    def log(self) -> Path:
        """Return the file with the engine's output."""
        return self.config.run / "engine.log"

    def routes(self, source: Source[Any]) -> Judgments:
        """Return panjue's routes, answered by an engine or endpoint."""
        judge = Judge(self.asker, self.decider, source)
        demo = not self.config.endpoint and is_demo(self.served.model)
        return Judgments(judge, self.config.task, self.law, self.config.in_flight, demo=demo)


def make_service(config: ServeConfig) -> Service:
    """Load all parts, and merge the adapter if needed; the engine is not started yet."""
    task, trained = load_task(config.task), trained_folder(config)
    if task.data.by_hand is None:
        raise UserError(f"task: {config.task!r} cannot be served: it does not define 'by_hand'")
    labels = load_labels(trained / "labels.json")
    max_tokens = config.max_tokens or read_json(trained / "manifest.json")["max_tokens"]
    texts = read_law(config.law) if config.law else {}
    adapter = "none" if config.endpoint else config.adapter
    served = served_model(trained, adapter, config.base)
    return Service(
        config,
        Asker(task, labels, served.model, max_tokens),
        fitted_decider(task, labels, None if adapter == "none" else trained),
        {article: texts[article] for article in labels.names("articles") if article in texts},
        served,
    )
