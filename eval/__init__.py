"""Completions in, answers and scores out.

Read in this order: answers.py (a test file with its answers), decoding.py (completions ->
submission), beliefs.py, pool.py, classifier.py, rule.py and decide.py (replies -> one answer),
fit_rule.py (fits that), second_stage.py (of the classifier), values.py (the one loop that scores),
score.py, baselines.py, calibration.py, compare.py, group_counts.py, fairness.py, report.py;
check.py stands apart.
"""
