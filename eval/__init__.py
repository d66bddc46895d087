"""Score answers. Only the command line imports this folder.

Read in this order: score.py with metric_values.py (the one loop that scores), baselines.py,
reliability.py (whether confidences are right), twins.py, stage.py (the label lists of a contest's
stage) and show_scores.py; choice.py (who answers best), compare.py, vote.py, fairness.py, report.py
with cases_shown.py, agreement.py, shown.py, field_why.py and curve.py; explain.py (what a report
shows of one case). runs.py and check.py are independent of these.
"""
