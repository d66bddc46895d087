"""Macro F1 over the six classes of a prison term (FairLex-CAIL)."""

from panjue.eval import classes

macro_f1 = classes.macro_f1(6)
accuracy = classes.accuracy
