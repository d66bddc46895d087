"""Train an adapter on examples, and a text classifier beside it.

Read sft.py first, from top to bottom. It uses, in this order: settings.py with start.py (the
training that another one starts from), distributed.py, library_settings.py, model.py,
training_run.py with rules.py and source_code.py, examples.py, classifier/ (from fit.py on),
data.py, packed_attention.py, memory.py, trainer.py with reply_loss.py and curves.py,
checkpoints.py, kept.py and stop.py, training_log.py with estimate.py, summary.py, trained.py (a
training that was opened) and card.py with card.jinja (the model card).

foreign.py and adopt.py make a run folder of an adapter that another trainer wrote.

words.py finds the config and the run folder that the arguments of `panjue sft` mean. vllm_probe.py
asks vLLM whether it knows a base. base.py makes the demo's base model. make.py decides what a
target of the Makefile runs.
"""
