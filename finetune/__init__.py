"""Train an adapter on examples.

Read sft.py first, from top to bottom. It uses, in this order: settings.py and libraries.py,
processes.py, examples.py, data.py, model.py, trainer.py with checkpoints.py and stop.py,
classifier.py with calibrate.py and second_stage.py, journal.py, result.py. base.py makes the
demo's base model.

make.py says what a target of the Makefile runs.
"""
