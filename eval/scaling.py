"""Scaling of the text classifier's probabilities, by how often what they are given to was right."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit

from panjue.prompts.plumbing.run import ANSWERS, MANIFEST, AnswersRecord, Run

MIN_SCALED = 50
"""Items or judgments that a scaling needs; with fewer the probabilities stay as they are."""

TINY = 1e-9
"""No probability counts as less, and none as closer to 1."""

Scaling = Mapping[str, Mapping[str, tuple[float, float]]]
"""Field -> `agree` or `differ`, as model and classifier do -> scale and shift of the log-odds."""


def platt(
    logits: NDArray[Any], gold: NDArray[Any], weights: NDArray[Any] | None = None
) -> tuple[float, float]:
    """Return the scale, which is positive, and shift of logits with the lowest log loss.

    `gold` has the probability that each is right: 0 and 1, or what is known of it. `weights` are
    those of the items if all logits are not alike.
    """
    right = gold.astype(float)

    def loss(of: NDArray[Any]) -> float:
        logits_now = logits * np.exp(of[0]) + of[1]
        if_right = np.logaddexp(0, -logits_now)
        if_wrong = np.logaddexp(0, logits_now)
        return float(np.average(right * if_right + (1 - right) * if_wrong, weights=weights))

    log_scale, shift = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return float(np.exp(log_scale)), float(shift)


class Judgment(NamedTuple):
    """What the model answered in one field of one item."""

    field: str
    agrees: bool  # whether the text classifier answers the same
    chance: float  # the classifier's probability that exactly this answer is right
    correct: bool


def scaling_of(judgments: Iterable[Judgment]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the scaling that fits these judgments best.

    Platt's targets in place of 0 and 1 keep a group without an error from being certain (Platt,
    "Probabilistic outputs for support vector machines", 1999).
    """
    groups: dict[tuple[str, str], list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        groups[judgment.field, agreement_key(judgment.agrees)].append(judgment)
    scaling: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for (name, agreement), group in groups.items():
        if len(group) < MIN_SCALED:
            continue
        chances = log_odds([judgment.chance for judgment in group])
        correct = np.array([judgment.correct for judgment in group])
        right = correct.sum()
        wrong = len(group) - right
        targets = np.where(correct, (right + 1) / (right + 2), 1 / (wrong + 2))
        scaling[name][agreement] = platt(chances, targets)
    return dict(scaling)


def scaled(scaling: Scaling, name: str, agrees: bool, chance: float) -> float:
    """Return the confidence in an answer of the model; for the arguments see `Judgment`."""
    of_field = scaling.get(name, {})
    if (agreement := agreement_key(agrees)) not in of_field:
        return chance
    scale, shift = of_field[agreement]
    return float(expit(scale * log_odds(chance) + shift))


def agreement_key(agrees: bool) -> str:
    return "agree" if agrees else "differ"


def log_odds(chance: ArrayLike) -> NDArray[Any]:
    return np.asarray(logit(np.clip(chance, TINY, 1 - TINY)))


def scaling_of_run(run: Run, trained_sha256: str) -> Scaling:
    """Return the scaling that the newest answers of this very training recorded, if any did."""
    found: Scaling = {}
    paths = run.folder.glob(f"{ANSWERS}/*/{MANIFEST}")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        record = AnswersRecord.read(path.parent)
        if record.scaling and record.trained_sha256 == trained_sha256:
            found = record.scaling
    return found
