"""Fill in [MASK], to measure a model's knowledge (CCKS2021, 预训练模型知识量度量).

Ranked answers are scored as in the contest, after SQuAD.
"""

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product, starmap
from typing import Any

from panjue.prompts.example import Answer, Decoded, Example, Ranking, known_groups
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.decode import last_object, load_json, strings_in, visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Schema, Score, Task, closed_object, text_of
from panjue.prompts.tasks.cloze.table import RET_TABLE
from panjue.prompts.tasks.metrics import Field, Item, Row, overlap_f1, texts

MASK = "[MASK]"

MAX_ANSWERS = 5
"""Number of answers, the contest's K; its script counts even more answers."""

MAX_ANSWER_LENGTH = 100
"""In characters."""

GROUPS = ("domain", "NeedReasoning")
"""Optional fields of a row by which scores are reported."""

MONTH_NAMES = (  # noqa: SIM905  # one word per line would be too long
    "january february march april may june july august september october november december"
).split()
SMALL_NUMBERS = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905


def _number_words() -> dict[str, str]:
    """Return the numbers below a hundred in words -> in digits: `twenty one` -> `21`."""
    digits = {word: str(value) for value, word in enumerate(SMALL_NUMBERS)}
    for value, ten in enumerate(TENS, start=2):
        digits[ten] = f"{value}0"
        for unit, word in enumerate(SMALL_NUMBERS[1:10], start=1):
            digits[f"{ten} {word}"] = f"{value}{unit}"
    return digits


NUMBER_WORDS = _number_words()

ISO_DATE = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
NUMBER_OR_WORD = re.compile(r"(\d+)(?:st|nd|rd|th)?\b|([a-z]+)\.?")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLE = re.compile(r"\b(a|an|the)\b")


def read(row: Mapping[str, Any]) -> Example:
    """Read a case: a `query` with [MASK], and for a training or gold file its `answer` texts."""
    key = row.get("qid")
    if not isinstance(key, str | int) or isinstance(key, bool) or not str(key).strip():
        raise UserError("'qid' must be a text that is not empty, or a whole number")
    query = text_of(row, "query")
    masks = query.count(MASK)
    gold = row.get("answer")
    if gold is not None and not _is_texts(gold):
        raise UserError("'answer' must list one text or more")
    answers = list(dict.fromkeys(map(contest_form, gold or ())))[:MAX_ANSWERS]
    return Example(
        id=key,
        text=query,
        names=(MASK,) if masks else (),  # `shorten` keeps the sentence with it
        answer={"answers": answers} if gold else None,
        references=(tuple(gold),) if gold else (),
        groups=known_groups({name: row[name] for name in GROUPS if name in row}),
        notes=() if masks == 1 else (f"the query has {masks} {MASK} instead of one",),
    )


def _is_texts(value: Any) -> bool:
    """Say whether a value is a list of one or more texts that are not empty."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(text, str) and text.strip() for text in value)


def schema(_example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of a reply: one to five answers."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_ANSWER_LENGTH}
    answers = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_ANSWERS}
    return closed_object({"answers": answers})


def decode(reply: str, _example: Example, labels: Labels) -> Decoded:
    """Read the ranked answers of a reply; without any, the commonest of the training count."""
    found = last_object(reply, ["answers"])
    # more than are scored, since repeated and empty ones are dropped
    written = strings_in(found.value.get("answers"))[: 4 * MAX_ANSWERS]
    repairs = []
    answers: list[str] = []
    is_valid = load_json(reply) == {"answers": written} and 0 < len(written) <= MAX_ANSWERS
    if not is_valid or not all(0 < len(text) <= MAX_ANSWER_LENGTH for text in written):
        repairs.append("not the JSON that was asked for")
    for text in written:
        answer = contest_form(text[:MAX_ANSWER_LENGTH])
        if answer != text:
            repairs.append("an answer converted to the contest's format")
        if answer in answers or not answer:
            repairs.append("an answer repeated or empty")
        else:
            answers.append(answer)
    if len(answers) > MAX_ANSWERS:
        repairs.append(f"cut to {MAX_ANSWERS} answers")
    if not answers:
        commonest = list(labels.counts.get("answers", ()))[:MAX_ANSWERS]
        return Decoded({"answers": commonest}, ("no answer",), readable=False)
    return Decoded({"answers": answers[:MAX_ANSWERS]}, tuple(repairs))


def contest_form(answer: str) -> str:
    """Convert an answer to the contest's format; an answer in this format does not change.

    The result is in lower case; a date has year, English month and day. A number stays as it is
    written: the contest wants digits, but has a few numbers in words (see `write`).
    """
    # An escape such as \\ud800 in JSON is half a pair, which a submission cannot contain.
    encodable = visible(answer).encode("utf-8", "ignore").decode("utf-8")
    text = " ".join(encodable.lower().split())
    date = ISO_DATE.fullmatch(text)
    if not date:
        return _date_in_words(text) or text
    month = int(date[2])
    if not 1 <= month <= 12:
        return text
    return f"{date[1]} {MONTH_NAMES[month - 1]} {int(date[3])}"


def _date_in_words(text: str) -> str | None:
    """Return `1785 october 17` for `october 17th, 1785` or `17 oct. 1785`; None: no date."""
    words = re.split(r"[\s,]+", text)
    if len(words) != 3:
        return None
    numbers = []
    months = []
    for match in filter(None, map(NUMBER_OR_WORD.fullmatch, words)):
        number, word = match.groups()
        if number:
            numbers.append(number)
        elif len(word) > 2:
            months += [month for month in MONTH_NAMES if month.startswith(word)]
    if len(numbers) != 2 or not months:
        return None
    year, day = sorted(numbers, key=len, reverse=True)
    if len(day) > 2 or len(year) not in (3, 4):
        return None
    return f"{year} {months[0]} {day}"


def count_answers(examples: Iterable[Example]) -> Labels:
    """Count the training answers; the commonest replace missing answers."""
    answers = []
    for example in examples:
        for references in example.references:  # one set; none in a test file
            answers.append({"answers": map(contest_form, references)})
    return collect(answers)


def write(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the submission row: `five` -> `5` and, if there is room, `five`.

    The best answer counts, and gold has most numbers in digits but a few in words. A number must
    be below a hundred, and the whole answer: a name may contain one (`three gorges dam`).
    """
    in_digits = []
    in_words = []
    for text in answer["answers"]:
        digits = NUMBER_WORDS.get(text.replace("-", " "))
        in_digits.append(digits or text)
        in_words += [text] if digits else []
    both = dict.fromkeys([*in_digits, *in_words])
    return {"id": example.id, "ret": list(both)[:MAX_ANSWERS]}


def check(_example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield the faults of a submission row in its list of answers, `ret`."""
    ret: Any = row.get("ret")
    if not _is_texts(ret):
        yield "'ret' must be a list of texts"
    elif len(ret) > MAX_ANSWERS:
        yield f"'ret' has {len(ret)} answers: 1 to {MAX_ANSWERS} are asked for, though all count"
    elif len(set(ret)) < len(ret):
        yield "'ret' has an answer twice"


def has_answer(row: Row) -> bool:
    """Say whether a submission row has any answer; the contest refuses rows without one."""
    return bool(row["ret"])


def f1(gold: Row, predicted: Row | None) -> float:
    """Best F1 of the `tokens` of any answer and any gold answer; 0 without a row or an answer.

    TypeError: the answers are not a list.
    """
    answers = [] if predicted is None else predicted["ret"]
    if not isinstance(answers, list):
        raise TypeError
    [references] = gold["references"]
    golds = map(tokens, references)
    predictions = map(tokens, answers)
    return max(starmap(overlap_f1, product(golds, predictions)), default=0.0)


def shown(gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield the ranked answers and the gold ones; they are right if one answer is."""
    [references] = gold["references"]
    golds = list(dict.fromkeys(references))
    predicted = texts(row["ret"]) if row else []
    yield "", [Field("answers", golds, predicted, f1(gold, row) == 1)]


def tokens(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation and articles."""
    return ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


TASK = Task(
    data=Data(read=read, write=write, submission=RET_TABLE, check=check),
    ask=Ask(prompt=partial(render, "cloze"), schema=schema, decode=decode, labels=count_answers),
    score=Score(
        metrics=(f1,),
        needs=has_answer,
        fallback="commonest answers",
        shown=shown,
        titles={
            "f1": ("token F1", "词 F1"),
            "answers": ("answers", "答案"),
            "commonest answers": ("always the commonest answers", "始终预测最常见的答案"),
        },
    ),
    ranking=Ranking("answers", MAX_ANSWERS),
)
