"""Train an adapter on examples, and a text classifier beside it.

Read sft.py first, from top to bottom. It uses, in this order: settings.py, distributed.py,
library_settings.py, model.py, training_run.py with rules.py and source_code.py, examples.py,
classifier/ (from fit.py on), data.py, trainer.py with checkpoints.py, kept.py and stop.py,
training_log.py, summary.py, card.py (the model card).

words.py says what the words of `panjue sft` mean: which config, which run folder. base.py makes the
demo's base model. make.py says what a target of the Makefile runs.
"""
