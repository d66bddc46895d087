"""Macro F1 over the fourteen issue areas (FairLex-SCOTUS)."""

from panjue.eval import classes

macro_f1 = classes.macro_f1(14)
accuracy = classes.accuracy
