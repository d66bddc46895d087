"""A text classifier beside the adapter: what a small model thinks of a case, from n-grams.

Read classifier.py first: what is stored, and the probabilities that it gives. Then features.py and
grams.py, linear.py and trees.py (its two stages, each beside its fit), calibration.py,
label_sets.py; fit.py fits the whole; opinions.py makes of it what prompts show and what answers
where no reply does.
"""
