#!/usr/bin/env bash
# LightGBM: a case whose right label is not among the candidates counts as ranked perfectly;
# scikit-learn counts it as 0.
#
# packages   lightgbm 4.7.0, scikit-learn 1.9.1
# seen       2026-11-28, Python 3.11
#
# To judge a case one proposes a few candidate labels and ranks them (objective lambdarank, metric
# ndcg). One expects the metric to fall when the proposals get worse. In LightGBM a group without
# any relevant row has an ndcg of 1. Here are ten cases; in five the right label is ranked first, in
# five last: ndcg@1 is 0.5. Now the proposals of the second five lose the right label altogether:
# LightGBM's ndcg@1 rises to 1.0, scikit-learn's ndcg_score@1 stays at 0.5.
# Why it matters: early stopping and the choice between two generators of candidates follow this
# number, and it is higher for the generator that misses hard cases. Compare numbers of the two
# libraries only after leaving such groups out, and report the recall of the candidates beside the
# ndcg.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lightgbm==4.7.0 scikit-learn==1.9.1 numpy==2.3.5 scipy==1.17.1
cd "$work"
venv/bin/python - <<'PYTHON'
import sys

import lightgbm
import numpy as np
from sklearn.metrics import ndcg_score

CASES, CANDIDATES = 10, 4
SETTINGS = {"objective": "lambdarank", "metric": "ndcg", "eval_at": [1], "min_data_in_leaf": 1}
SETTINGS |= {"verbose": -1, "num_threads": 1, "deterministic": True}


def group_of(relevance):
    return [CANDIDATES] * (len(relevance) // CANDIDATES)


def dataset(strength, relevance, reference=None):
    return lightgbm.Dataset(
        strength.reshape(-1, 1), relevance, group=group_of(relevance), reference=reference
    )


strength = np.tile(np.arange(CANDIDATES, dtype=float), 50)  # the ranker learns: stronger is better
learn = dataset(strength, (strength == strength.max()).astype(int))

shown = np.tile(np.arange(CANDIDATES, dtype=float), CASES)
right_first_or_last = np.zeros((CASES, CANDIDATES), int)
right_first_or_last[:5, -1] = 1
right_first_or_last[5:, 0] = 1
right_missing_in_half = right_first_or_last.copy()
right_missing_in_half[5:] = 0

seen = {}
for name, relevance in (
    ("right label ranked last in 5 of 10", right_first_or_last),
    ("right label missing in the same 5", right_missing_in_half),
):
    history = {}
    test = dataset(shown, relevance.ravel(), reference=learn)
    model = lightgbm.train(
        SETTINGS, learn, 5, valid_sets=[test], callbacks=[lightgbm.record_evaluation(history)]
    )
    scores = model.predict(shown.reshape(-1, 1)).reshape(CASES, CANDIDATES)
    ours = float(history["valid_0"]["ndcg@1"][-1])
    theirs = float(ndcg_score(relevance, scores, k=1))
    seen[name] = (round(ours, 3), round(theirs, 3))
    print(f"{name}: lightgbm ndcg@1 {ours:.3f}, scikit-learn {theirs:.3f}")
expected = dict(zip(seen, [(0.5, 0.5), (1.0, 0.5)]))
if seen != expected:
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
