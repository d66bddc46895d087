"""Issue area of a case before the US Supreme Court (FairLex-SCOTUS; Chalkidis et al., ACL 2022)."""

from panjue.prompts.tasks.classes import Classes

AREAS = (
    "Criminal Procedure",
    "Civil Rights",
    "First Amendment",
    "Due Process",
    "Privacy",
    "Attorneys",
    "Unions",
    "Economic Activity",
    "Judicial Power",
    "Federalism",
    "Interstate Relations",
    "Federal Taxation",
    "Miscellaneous",
    "Private Action",
)
"""The issue areas of the Supreme Court Database, in its order."""

# FairLex publishes eleven of the areas, with its own numbers.
TASK = Classes(
    "scotus",
    AREAS,
    named=True,
    numbers=(*AREAS[:10], "Federal Taxation"),
    groups={
        "decision_direction": ("conservative", "liberal"),
        "respondent_type": ("other", "person", "organization", "public entity", "facility"),
    },
).task()
