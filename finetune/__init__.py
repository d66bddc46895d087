"""Train an adapter on examples.

Read settings.py, examples.py, data.py, trainer.py and sft.py, in this order.
"""
