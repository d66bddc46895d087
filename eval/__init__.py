"""Completions in, answers and scores out: pure functions, no torch."""
