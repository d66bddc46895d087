"""A text classifier beside the adapter: what a small model thinks of a case, from n-grams.

Read classifier.py first: it says what is stored and computes the probabilities. Then read
features.py and grams.py, linear.py and trees.py (the two stages, each with its fit),
calibration.py and label_sets.py. fit.py fits the whole classifier. opinions.py turns its
probabilities into the text that prompts show, and into answers that a reply lacks. why.py says
which words, sentences and features gave a label its probability.
"""
