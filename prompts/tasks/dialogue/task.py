"""Long dialogues: who feels what about what, and why (EmoCaustics' sextuples and emotion events).

An example takes several calls (`solve`), in one of three ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from panjue.prompts.example import Answer, Example, Solve, Turn
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Messages, Score, Task
from panjue.prompts.tasks.dialogue import metric
from panjue.prompts.tasks.dialogue.dialogues import DIALOGUES, dialogues
from panjue.prompts.tasks.dialogue.gold import gold_oracle
from panjue.prompts.tasks.dialogue.matching import AGREE, make_matching
from panjue.prompts.tasks.dialogue.sextuples import (
    FIELDS,
    SENTIMENTS,
    check,
    decode,
    emotion_faults,
    reserve,
    schema,
    target,
)
from panjue.prompts.tasks.dialogue.similarity import (
    BUILT_IN,
)
from panjue.prompts.tasks.dialogue.solve import Settings, head, solve, transcript
from panjue.prompts.tasks.metrics import Row


def read(row: Mapping[str, Any]) -> Example:
    """Read one dialogue.

    Raises:
        UserError: A sentence is broken. Broken emotions are a note: the sentences stay good.
    """
    chat = row.get("chat")
    if not isinstance(chat, list) or not chat or not all(isinstance(one, dict) for one in chat):
        raise UserError("the chat must list one sentence or more")
    turns = tuple(_turn(number, one) for number, one in enumerate(chat, start=1))
    told = [sum(key.title() in one for one in chat) for key in FIELDS]
    if any(told) and set(told) != {len(chat)}:
        raise UserError("some sentences have Target, Aspect, … and others have not")
    sextuples = [_gold_sextuple(number, one) for number, one in enumerate(chat, start=1)]
    holders, problem = _emotions(row)
    notes = [problem] if problem else []
    if any(told) and row.get("emo") is None and not problem:
        notes.append(f"emo/emo_{row['id']}.json is missing: no events are scored")
    if any(told):
        notes += _odd(sextuples, holders or [])
    return Example(
        id=str(row["id"]),
        text=transcript(turns),
        names=tuple(map(head, turns)),
        answer={"sentences": sextuples, "holders": holders} if any(told) else None,
        groups={"turns": _size(len(turns))},
        turns=turns,
        notes=tuple(notes),
    )


def _turn(number: int, one: Mapping[str, Any]) -> Turn:
    """Read who says what; both are free strings, and may be empty."""
    holder, sentence = one.get("Holder"), one.get("sentence")
    if not isinstance(holder, str | int) or not isinstance(sentence, str):
        raise UserError(f"sentence {number}: 'sentence' and 'Holder' must be texts")
    return Turn(number, str(holder), sentence)


def _gold_sextuple(number: int, one: Mapping[str, Any]) -> dict[str, Any]:
    found = {field: one.get(field.title(), "") for field in FIELDS}
    wrong = next((field for field, value in found.items() if not isinstance(value, str)), None)
    if wrong:
        raise UserError(f"sentence {number}: {wrong.title()!r} must be a text")
    return {"id": number, **found}


def _emotions(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, str]:
    """Return every holder's events, or None and what is wrong with them."""
    if row.get("emo_problem"):
        return None, str(row["emo_problem"])
    if row.get("emo") is None:
        return None, ""
    wrong = next(emotion_faults(row["emo"]), "")
    if wrong:
        return None, f"emo/emo_{row['id']}.json: {wrong}"
    return [{"holder": name, "events": one["events"]} for name, one in row["emo"].items()], ""


def _odd(sextuples: Sequence[Row], holders: Sequence[Row]) -> Iterator[str]:
    """Yield the sentiments and states that are none of the five: they are scored, not taught."""
    known = {*SENTIMENTS, ""}
    for one in sextuples:
        if one["sentiment"] not in known:
            yield f"sentence {one['id']}: the sentiment {one['sentiment']!r} is none of the five"
    for one in holders:
        for event in one["events"]:
            for emotion in event["emotions"]:
                if emotion["state"] not in known:
                    yield f"holder {one['holder']}: the state {emotion['state']!r} is none of them"


def _size(turns: int) -> str:
    return "1-20" if turns <= 20 else "21-60" if turns <= 60 else "61+"


def prompt(example: Example) -> Messages:
    """Put a question, by the template of its step."""
    step = example.inputs.get("step", "")
    return render("dialogue", example, step)


# What is handed in.


def write(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the row that becomes `chat_<id>.json` and `emo_<id>.json`."""
    holders = answer["holders"]
    return {
        "id": example.id,
        "chat": [
            {
                "input_sentence": turn.sentence,
                "holder": turn.holder,
                "event": one.get("event", ""),
                "final_model_response": [{field: one[field] for field in FIELDS}]
                if any(one[field] for field in FIELDS)
                else [],
            }
            for turn, one in zip(example.turns, answer["sentences"], strict=True)
        ],
        "emo": {one["holder"]: {"events": one["events"]} for one in holders}
        if holders is not None
        else None,
    }


def by_meaning(embeddings: str = BUILT_IN, judge: str = AGREE) -> dict[str, Any]:
    """Return what depends on what compares texts; the names are those of `make_matching`."""
    matching = make_matching(embeddings, judge)
    return {
        "metrics": metric.metrics(matching),
        "shown": partial(metric.shown, matching),
        "compared_by": matching.name,
    }


TASK = Task(
    data=Data(read=read, write=write, rows=dialogues, submission=DIALOGUES, check=check),
    ask=Ask(prompt=prompt, schema=schema, target=target, decode=decode, reserve=reserve),
    score=Score(**by_meaning(), fallback="no opinions", by_meaning=by_meaning),
    answer=Solve(solve, gold_oracle, Settings.model_validate({})),
)
