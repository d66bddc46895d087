"""Macro F1 over the fourteen issue areas (FairLex-SCOTUS)."""

from panjue.eval import classes
from panjue.prompts.tasks.scotus import AREAS

macro_f1 = classes.macro_f1(len(AREAS), AREAS)
accuracy = classes.accuracy
