"""The length of a prison term, in six classes (FairLex-CAIL; Chalkidis et al., ACL 2022)."""

from panjue.prompts.tasks.classes import Classes
from panjue.prompts.tasks.evidence import evidence

CLASSES = (
    "没有刑期",
    "一年以下",
    "一年以上三年以下",
    "三年以上五年以下",
    "五年以上十年以下",
    "十年以上",
)

TASK = Classes(
    "severity",
    CLASSES,
    synonyms={
        **{f"有期徒刑{term}": term for term in CLASSES[1:]},
        **{f"{term}有期徒刑": term for term in CLASSES[1:]},
    },
    text="fact",
    groups={
        "gender": ("male", "female"),
        "region": ("Beijing", "Liaoning", "Hunan", "Guangdong", "Sichuan", "Guangxi", "Zhejiang"),
    },
    aliases={"defendant_gender": "gender", "court_region": "region"},
    person="defendant",
    evidence=evidence,
).task()
