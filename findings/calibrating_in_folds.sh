#!/usr/bin/env bash
# scikit-learn: if all examples of a label lie in one fold, a calibrated classifier no longer
# answers that label.
#
# package    scikit-learn 1.9.1
# seen       2026-11-28, Python 3.11
#
# One expects CalibratedClassifierCV to change how sure a classifier is, and hardly what it answers.
# Here all examples of one of four labels lie in the same fold, as happens to a rare charge when the
# cases of a court stay together. Logistic regression alone finds 84% of them. In
# CalibratedClassifierCV, by method and ensemble:
#   sigmoid, True       finds 0%, without a warning: one model never saw the label and gives it 0
#                       (documented); the other two know it, are calibrated on folds without it, and
#                       learn that it never occurs
#   sigmoid, False      finds 0%, with a warning about the number of classes
#   isotonic, True      finds 0%, without a warning
#   isotonic, False     finds 45%, with the warning
#   temperature, True   fits, and predict_proba raises a ValueError about shapes that cannot be
#                       broadcast
#   temperature, False  keeps all answers, and gives every one of them a confidence of 100%
# With stratified folds sigmoid finds 81%, so the folds are the cause and not the data.
# Why it matters: rare labels decide the macro F1 over charges, and a confidence of 100% hides every
# doubtful case. Calibrate in folds that each have every label; leave out labels too rare for that.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet scikit-learn==1.9.1 numpy==2.3.5 scipy==1.17.1
cd "$work"
venv/bin/python - <<'PYTHON'
import sys
import warnings

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, StratifiedKFold

random = np.random.default_rng(0)
X = random.normal(size=(120, 5))
y = np.argmax(X[:, :4] + 0.3 * random.normal(size=(120, 4)), axis=1)
LABEL = 2
fold = np.arange(120) % 3
fold[y == LABEL] = 0


def calibrated(method, ensemble, folds):
    return CalibratedClassifierCV(LogisticRegression(), method=method, cv=folds, ensemble=ensemble)


def measure(classifier):
    """The share of the label's examples found, the mean confidence, whether there was a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = classifier.fit(X, y)
        try:
            confidence = model.predict_proba(X).max(axis=1).mean()
        except ValueError as error:
            return f"ValueError: {error}"
        found = (model.predict(X[y == LABEL]) == LABEL).mean()
    warned = any("Number of classes" in str(warning.message) for warning in caught)
    return round(float(found), 2), round(float(confidence), 2), warned


seen = {"alone": measure(LogisticRegression())}
for method in ("sigmoid", "isotonic", "temperature"):
    for ensemble in (True, False):
        folds = PredefinedSplit(fold)
        seen[f"{method}, {ensemble}"] = measure(calibrated(method, ensemble, folds))
seen["sigmoid, stratified"] = measure(calibrated("sigmoid", True, StratifiedKFold(3)))
print("found of the label's examples, mean confidence, warning about classes:")
for name, measured in seen.items():
    print(f"  {name:20} {measured}")

expected = {
    "alone": (0.84, 0.78, False),
    "sigmoid, True": (0.0, 0.69, False),
    "sigmoid, False": (0.0, 0.74, True),
    "isotonic, True": (0.0, 0.84, False),
    "isotonic, False": (0.45, 0.65, True),
    "temperature, False": (0.84, 1.0, True),
    "sigmoid, stratified": (0.81, 0.63, False),
}


def is_close(a, b):
    return abs(a[0] - b[0]) < 0.03 and abs(a[1] - b[1]) < 0.03 and a[2] == b[2]


error = seen.pop("temperature, True")
if "broadcast" not in error or not all(is_close(seen[name], expected[name]) for name in expected):
    sys.exit(f"changed; on 2026-11-28 it was {expected}")
PYTHON
