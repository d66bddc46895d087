"""Macro F1 over dismissal and approval (FairLex-FSCS)."""

from panjue.eval import classes

macro_f1 = classes.macro_f1(2)
accuracy = classes.accuracy
