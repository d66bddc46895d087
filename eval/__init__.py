"""Completions in, answers and scores out.

Read answers.py, decide.py, means.py and score.py, in this order.
"""
