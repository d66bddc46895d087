"""Long dialogues: who feels what about what, and why (EmoCaustics' sextuples and emotion events).

An example takes several calls of the model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from panjue.prompts.example import Answer, Example, Solve, Turn
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.render import render
from panjue.prompts.task import Ask, Data, Score, Task, id_of
from panjue.prompts.tasks.dialogue.dialogues import DIALOGUES, dialogues
from panjue.prompts.tasks.dialogue.gold import gold_oracle
from panjue.prompts.tasks.dialogue.metric import DIALOGUE_METRICS, shown
from panjue.prompts.tasks.dialogue.sextuples import (
    SENTIMENTS,
    SEXTUPLE,
    decode,
    reserve,
    schema,
    speakers,
)
from panjue.prompts.tasks.dialogue.solve import SolveConfig, head, inputs, solve, transcript
from panjue.prompts.tasks.dialogue.submission import (
    EMO_FILE,
    check,
    events_by_holder,
    form_faults,
    silent_holders,
    source_number,
    unknown_sentiments,
    unknown_states,
)
from panjue.prompts.tasks.metrics import Row


def read(row: Mapping[str, Any]) -> Example:
    """Read a dialogue, and its gold sextuples and emotions, if it has them."""
    chat = row.get("chat")
    if not isinstance(chat, list) or not chat or not all(isinstance(s, dict) for s in chat):
        raise UserError("the chat must list one sentence or more")
    turns = []
    sextuples = []
    for number, sentence in enumerate(chat, start=1):
        turns.append(_turn(number, sentence))
        sextuples.append(_gold_sextuple(number, sentence))
    is_labelled = _is_labelled(chat)
    problem = _emotion_problem(row, is_labelled)
    notes = [problem] if problem else []
    answer = None
    if is_labelled:
        events = {} if problem else events_by_holder(row["emo"])
        holders = [{"holder": name, "events": own} for name, own in events.items()]
        answer = {"sentences": sextuples, "holders": None if problem else holders}
        # Scoring takes gold with unknown labels, but training refuses it.
        notes += unknown_sentiments(sextuples)
        notes += unknown_states(events, states=(*SENTIMENTS, ""))  # in gold, a state may be empty
        notes += silent_holders(events, speakers(turns))
    return Example(
        id=str(id_of(row)),
        text=transcript(turns),
        names=tuple(map(head, turns)),  # `shorten` keeps the lines with these beginnings
        inputs=inputs(turns, events=()),  # no call has found events yet
        answer=answer,
        groups={"turns": _length_group(len(turns))},
        turns=tuple(turns),
        notes=tuple(notes),
    )


def _turn(number: int, sentence: Mapping[str, Any]) -> Turn:
    """Read the speaker and the text of a sentence; both may be empty."""
    holder = sentence.get("Holder")
    text = sentence.get("sentence")
    if not isinstance(holder, str | int) or not isinstance(text, str):
        raise UserError(f"sentence {number}: 'sentence' and 'Holder' must be texts")
    return Turn(number, str(holder), text)


def _is_labelled(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the sentences have gold sextuples: all fields of all sentences, or none.

    A field that is null means an empty text. If all fields of a dialogue are null, it has no gold.
    """
    keys = [field.title() for field in SEXTUPLE]
    pairs = list(product(chat, keys))
    if len({key in sentence for sentence, key in pairs}) > 1:
        raise UserError("some sentences have Target, Aspect, … and others do not")
    return any(sentence.get(key) is not None for sentence, key in pairs)


def _gold_sextuple(number: int, sentence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of a sentence with its fields; files have `Target` for `target`."""
    values = {}
    for field in SEXTUPLE:
        value = sentence.get(field.title())
        if not isinstance(value, str | None):
            raise UserError(f"sentence {number}: {field.title()!r} must be a text")
        values[field] = value or ""
    return {"id": number, **values}


def _emotion_problem(row: Mapping[str, Any], is_labelled: bool) -> str:
    """Return why the gold emotions of a dialogue cannot be used; empty if there is no problem."""
    if row.get("emo_problem"):
        return str(row["emo_problem"])
    if row.get("emo") is None:
        return f"emo/emo_{row['id']}.json is missing: no events are scored" if is_labelled else ""
    for fault in form_faults(EMO_FILE, row["emo"]):
        return f"emo/emo_{row['id']}.json: {fault}"
    return ""


def _length_group(turns: int) -> str:
    if turns <= 20:
        return "1-20"
    if turns <= 60:
        return "21-60"
    return "61+"


def write(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the row that becomes the two files of a dialogue."""
    chat = []
    for turn, sentence in zip(example.turns, answer["sentences"], strict=True):
        sextuple = {field: sentence[field] for field in SEXTUPLE}
        written = {
            "input_sentence": turn.sentence,
            "holder": turn.holder,
            "event": "",  # neither asked for nor scored
            "final_model_response": [sextuple] if any(sextuple.values()) else [],
        }
        chat.append(written)
    emo = None
    if answer["holders"] is not None:
        emo = {}
        for holder in answer["holders"]:
            emo[holder["holder"]] = {"events": list(map(_written_event, holder["events"]))}
    return {"id": example.id, "chat": chat, "emo": emo}


def _written_event(event: Row) -> dict[str, Any]:
    """Return an event whose sources are numbers if possible, since the scripts count no others."""
    emotions = []
    for emotion in event["emotions"]:
        source = emotion["source_id"]
        number = source_number(source)
        emotions.append({**emotion, "source_id": source if number is None else number})
    return {**event, "emotions": emotions}


TASK = Task(
    data=Data(read=read, write=write, rows=dialogues, submission=DIALOGUES, check=check),
    ask=Ask(prompt=partial(render, "dialogue"), schema=schema, decode=decode, reserve=reserve),
    score=Score(
        metrics=DIALOGUE_METRICS,
        shown=shown,
        fallback="no opinions",
        titles={
            "event": ("emotion events", "情感事件"),
            "sextuple": ("sextuples", "六元组"),
            "no opinions": ("always no opinions", "始终答“没有观点”"),
        },
    ),
    solve=Solve(steps=solve, gold_oracle=gold_oracle, settings=SolveConfig.model_validate({})),
)
