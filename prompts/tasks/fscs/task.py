"""Outcome before the Swiss Federal Supreme Court (FairLex-FSCS; Chalkidis et al., ACL 2022)."""

from panjue.prompts.tasks.classes import Classes

TASK = Classes(
    "fscs",
    ("dismissal", "approval"),
    synonyms={"dismissed": "dismissal", "approved": "approval"},  # the words of the prompt
    groups={
        "decision_language": ("de", "fr", "it"),
        "legal_area": (
            "other",
            "public law",
            "penal law",
            "civil law",
            "social law",
            "insurance law",
        ),
        "court_region": (
            "n/a",
            "Région lémanique",
            "Zürich",
            "Espace Mittelland",
            "Northwestern Switzerland",
            "Eastern Switzerland",
            "Central Switzerland",
            "Ticino",
            "Federation",
        ),
    },
).task()
