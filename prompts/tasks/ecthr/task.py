"""Violated articles of the Convention (FairLex-ECtHR; Chalkidis et al., ACL 2022)."""

from panjue.prompts.tasks.classes import Classes

TASK = Classes(
    "ecthr",
    tuple(f"Article {number}" for number in (2, 3, 5, 6, 8, 9, 10, 11, 14, "P1-1")),
    several=True,
    groups={
        "defendant_state": ("C.E. European", "Rest of Europe"),
        "applicant_gender": ("N/A", "Male", "Female"),
        "applicant_age": ("N/A", "<=35", "<=65", ">65"),
    },
).task()
