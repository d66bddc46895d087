"""Completions in, answers and scores out.

Read in this order: answers.py (a test file with its answers), classifier.py with
second_stage.py and opinions.py (what the text classifier thinks of a case), decoding.py
(completions -> submission), choice.py (who answers), values.py (the one loop that scores),
score.py, baselines.py, calibration.py, compare.py, fairness.py, report.py with shown.py; check.py
stands apart.
"""
