"""Answers in, scores out. Nothing but the command line imports it.

Read in this order: metric_values.py (the one loop that scores), score.py with baselines.py and
reliability.py (whether confidences are right), choice.py (who answers better), compare.py,
vote.py, fairness.py, report.py with agreement.py and shown.py; check.py stands apart.
"""
