"""Issue area of a case before the US Supreme Court (FairLex-SCOTUS; Chalkidis et al., ACL 2022)."""

from panjue.prompts.classify import Classes

TASK = Classes(
    "scotus",
    (
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
    ),
    groups={
        "decision_direction": ("conservative", "liberal"),
        "respondent_type": ("other", "person", "organization", "public entity", "facility"),
    },
).task()
