"""Macro F1 over the violated articles, or none (FairLex-ECtHR)."""

from panjue.eval import classes

macro_f1 = classes.macro_f1(10)
accuracy = classes.accuracy
