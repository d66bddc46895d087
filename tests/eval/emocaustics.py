"""The scripts of EmoCaustics that score, and small dialogues with the figures that they give.

The scripts ask two services. Here an embedding is the counts of a text's characters, so that equal
texts have the cosine 1 and texts without a common character 0; and the judge always says 1.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from panjue.eval.metric_values import metric_values, pooled, submission_rows
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.dialogue.sextuples import SENTIMENTS, SEXTUPLE

Row = dict[str, Any]

TASK = load_task("dialogue")

SERVICES = """
from types import SimpleNamespace as Reply


class OpenAI:
    def __init__(self, **_):
        self.embeddings = self
        self.chat = Reply(completions=Reply(create=self.judge))

    def create(self, model, input):
        alphabet = sorted({*"".join(input)})
        counts = [[text.count(character) for character in alphabet] for text in input]
        return Reply(data=[Reply(embedding=count) for count in counts])

    def judge(self, **_):
        return Reply(choices=[Reply(message=Reply(content="1"))])


AzureOpenAI = OpenAI
"""

MODULES = {"openai.py": SERVICES, "faiss.py": "", "torch.py": ""}
"""What is imported instead: the last two play no part in scoring."""

CONFIG = """
llm_config: {none: {model: none, base_url: none, api_key: none}}
embed_config: {none: {model: none, base_url: none, api_key: none}}
"""

TEXTS = ("aspect_similarity", "opinion_similarity", "rationale_similarity", "sentiment_correct")


def script_scores(scripts: Path, gold: Path, answers: Path, place: Path) -> dict[str, list[float]]:
    """Return id -> what the scripts give, in the order of panjue's metrics and from 0 to 1.

    First the mean of the percentages of states and of sources, then that of four averages of the
    first scheme. A dialogue whose files they do not find is not in it.
    """
    words = (scripts / "get_emo_score.py", "--input_dir", answers / "emo")
    events = _run(place / "emo", *words, "--gt_dir", gold / "emo")
    words = (scripts / "get_quadruples_score.py", "--pred_dir", answers / "chat")
    chats = _run(place / "chat", *words, "--gt_dir", gold / "chat")
    scores = {}
    for name, result in events.items():
        key = name.removeprefix("evaluation_")
        averages = chats[f"evaluation_results_chat_{key}"]["averages"]["scheme1"]
        total = result["total_score"]
        points = total["total_state_score"] + total["total_source_id_score"]
        event = points / (2 * total["total_possible_score"])
        scores[key] = [event, fmean(averages[f"avg_{text}"] for text in TEXTS)]
    return scores


def _run(place: Path, *words: object) -> dict[str, Row]:
    """Return name -> content of the result of each dialogue."""
    place.mkdir(parents=True)
    modules = place / "modules"
    modules.mkdir()
    for name, text in MODULES.items():
        (modules / name).write_text(text, "utf-8")
    (place / "config.yaml").write_text(CONFIG, "utf-8")
    options = ["--config_path", "config.yaml", "--output_dir", "results"]
    models = ["--embedding_model", "none", "--llm_model", "none"]
    command = [sys.executable, *map(str, words), *options, *models]
    environment = {**os.environ, "PYTHONPATH": str(modules), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = {}
    for path in (place / "results").glob("evaluation_*.json"):
        if path.stem != "evaluation_results_summary":
            results[path.stem] = json.loads(path.read_text("utf-8"))
    return results


def own_scores(gold: Path, answers: Path) -> dict[str, list[float]]:
    """Return id -> what panjue gives."""
    rows = submission_rows(TASK, answers)
    scores = {}
    for example in Reader(TASK).read(gold):
        values = metric_values(TASK, TASK.gold(example), rows.get(example.id), "")
        scores[str(example.id)] = pooled(TASK, values, np.array(1.0)).tolist()
    return scores


GOLD_CHAT = [
    {
        "sentence": "你又喝了。",
        "Holder": "1",
        "Target": "饮酒",
        "Aspect": "习惯",
        "Opinion": "不满",
        "Sentiment": "negative",
        "Rationale": "劝过多次",
    },
    {
        "sentence": "高兴嘛！",
        "Holder": "2",
        "Target": "升学",
        "Aspect": "结果",
        "Opinion": "欣喜",
        "Sentiment": "positive",
        "Rationale": "考上大学",
    },
]
GOLD_EMO = {
    "1": {
        "events": [
            {
                "event": "争吵",
                "emotions": [
                    {"state": "negative", "reason": "饮酒", "source_id": "2"},
                    {"state": "doubt", "reason": "学费", "source_id": "1"},
                ],
            }
        ]
    },
    "2": {
        "events": [
            {
                "event": "升学",
                "emotions": [{"state": "positive", "reason": "考上", "source_id": "2"}],
            }
        ]
    },
}


class Answer:
    """The files of that dialogue and of an answer to it, right in every part."""

    def __init__(self) -> None:
        self.gold_chat: list[Row] = deepcopy(GOLD_CHAT)
        self.gold_emo: Row = deepcopy(GOLD_EMO)
        self.chat: list[Row] = []
        for sentence in GOLD_CHAT:
            sextuple = {field: sentence[field.title()] for field in SEXTUPLE}
            given = {"input_sentence": sentence["sentence"], "holder": sentence["Holder"]}
            self.chat.append({**given, "event": "", "final_model_response": [sextuple]})
        self.emo: Row = deepcopy(GOLD_EMO)
        for emotion in (*self.event("1")["emotions"], *self.event("2")["emotions"]):
            emotion["source_id"] = int(emotion["source_id"])

    @property
    def sextuple(self) -> Row:
        """The sextuple of the first sentence."""
        sextuple: Row = self.chat[0]["final_model_response"][0]
        return sextuple

    def event(self, holder: str) -> Row:
        """Return the only event of a holder."""
        event: Row = self.emo[holder]["events"][0]
        return event

    def respond(self, response: object) -> None:
        """Answer the first sentence with something else than a list of its sextuple."""
        self.chat[0]["final_model_response"] = response

    def write(self, gold: Path, answers: Path, key: str) -> None:
        """Write the files under an id; those of the answer have the names that the scripts read."""
        files = {
            gold / f"chat/chat_{key}.json": self.gold_chat,
            gold / f"emo/emo_{key}.json": self.gold_emo,
            answers / f"chat/output_chat_{key}.json": self.chat,
            answers / f"emo/output_emotions_{key}.json": self.emo,
        }
        for path, value in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dump(value), "utf-8")


@dataclass(frozen=True)
class Case:
    """An answer with what it is damaged by, and its scores: of the events, of the sextuples."""

    damage: Callable[[Answer], object]
    official: tuple[float, float]
    """What the scripts give, at commit 0f9ba5e of 12 April 2025."""
    own: tuple[float, float] | None = None
    """What panjue gives, if that differs."""
    faults: tuple[str, ...] = ()
    """What `panjue check` finds."""


def _sources_as_texts(answer: Answer) -> None:
    answer.emo = deepcopy(GOLD_EMO)


def _in_capitals(answer: Answer) -> None:
    answer.respond([{key.title(): value for key, value in answer.sextuple.items()}])


def _with_opinions(answer: Answer) -> None:
    answer.sextuple["opinions"] = answer.sextuple.pop("opinion")


def _with_more_keys(answer: Answer) -> None:
    answer.chat[0] |= {"identified_target": "饮酒", "rag_modules": [], "sentence_id": 1}
    answer.event("1").update(sentence_ids=[1], sentences=["你又喝了。"])


def _with_a_doubled_emotion(answer: Answer) -> None:
    emotions = answer.gold_emo["1"]["events"][0]["emotions"]
    emotions[1] = emotions[0]
    del answer.event("1")["emotions"][1]


SENTENCE = "sentence 1: the sextuple has no "
EMOTION = "emo.2.events.0.emotions.0."

CASES = {
    "all right": Case(lambda answer: None, (1, 1)),
    # What the baselines write.
    "sources are texts": Case(
        _sources_as_texts,
        (0.5, 1),
        own=(1, 1),
        faults=("3 source ids are texts such as '2'; the scripts count numbers",),
    ),
    "no event": Case(lambda answer: answer.chat[0].pop("event"), (1, 1)),
    "event is null": Case(lambda answer: answer.chat[0].update(event=None), (1, 1)),
    "an object, no list": Case(lambda answer: answer.respond(answer.sextuple), (1, 1)),
    "opinions": Case(_with_opinions, (1, 1)),
    "in capitals": Case(_in_capitals, (1, 0.875), faults=(f"{SENTENCE}opinion",)),
    "raw_response": Case(
        lambda answer: answer.respond({"raw_response": "不知道"}),
        (1, 0.5),
        faults=(f"{SENTENCE}target, aspect, opinion, sentiment, rationale",),
    ),
    "the answer is null": Case(
        lambda answer: answer.respond(None),
        (1, 0.5),
        faults=("sentence 1: the answer is null, which counts as no sextuple",),
    ),
    "no answer": Case(
        lambda answer: answer.chat[0].pop("final_model_response"),
        (1, 0.5),
        faults=("chat.0.final_model_response: Field required",),
    ),
    "a text is null": Case(lambda answer: answer.sextuple.update(opinion=None), (1, 0.875)),
    "more keys": Case(_with_more_keys, (1, 1)),
    "an emotion, no list": Case(
        lambda answer: answer.event("2").update(emotions=answer.event("2")["emotions"][0]), (1, 1)
    ),
    "no source": Case(
        lambda answer: answer.event("2")["emotions"][0].pop("source_id"),
        (0.75, 1),
        faults=(f"{EMOTION}source_id: Field required",),
    ),
    "an empty emotion": Case(
        lambda answer: answer.event("2").update(emotions=[{}]),
        (0.5, 1),
        faults=tuple(
            f"{EMOTION}{field}: Field required" for field in ("state", "reason", "source_id")
        ),
    ),
    "no events": Case(
        lambda answer: answer.emo["2"].clear(),
        (0.5, 1),
        faults=("emo.2.events: Field required",),
    ),
    "no holder": Case(
        lambda answer: answer.emo.pop("2"), (0.5, 1), faults=("holder '2' is not answered",)
    ),
    # Where the scripts differ from the authors' page, which panjue keeps to.
    "half a dialogue": Case(
        lambda answer: answer.chat.pop(),
        (1, 1),
        own=(1, 0.5),
        faults=("the chat must list 2 sentences",),
    ),
    "a similar text": Case(
        lambda answer: answer.sextuple.update(opinion="不"), (1, 0.9634), own=(1, 0.875)
    ),
    "a similar reason": Case(
        lambda answer: answer.event("2")["emotions"][0].update(reason="考"), (1, 1), own=(0.5, 1)
    ),
    "one answer to two of gold": Case(_with_a_doubled_emotion, (1, 1), own=(0.75, 1)),
}


def random_answer(draw: random.Random) -> Answer:
    """Return a damaged answer that the scripts and panjue must score alike.

    Texts have a common character only if they are equal, no holder has two events of a name, no
    event two emotions of a reason, and every event has an emotion from a single speaker.
    """
    answer = Answer()
    holders = [str(number) for number in range(1, draw.randint(1, 3) + 1)]
    answer.gold_chat = []
    for _ in range(draw.randint(1, 5)):
        texts = [_word(draw) for _ in range(5)]
        sextuple = dict(zip(SEXTUPLE, texts, strict=True)) | {"sentiment": draw.choice(SENTIMENTS)}
        if draw.random() < 0.2:
            sextuple = dict.fromkeys(SEXTUPLE, "")
        gold = {field.title(): text for field, text in sextuple.items()}
        turn = {"sentence": _word(draw), "Holder": draw.choice(holders)}
        answer.gold_chat.append({**turn, **gold})
    answer.gold_emo = {holder: {"events": _random_events(draw)} for holder in holders}
    row = {"id": "1", "chat": answer.gold_chat, "emo": answer.gold_emo}
    example = TASK.data.read(row)
    written = TASK.data.write(example, _damaged(deepcopy(dict(example.answer or {})), draw))
    answer.chat, answer.emo = written["chat"], written["emo"]
    for sentence in answer.chat:
        _write_as_a_baseline(sentence, draw)
    for holder in answer.emo.values():
        for event in holder["events"]:
            if len(event["emotions"]) == 1 and draw.random() < 0.3:
                event["emotions"] = event["emotions"][0]
            if draw.random() < 0.3:
                event["sentence_ids"] = [1]
    return answer


def _word(draw: random.Random) -> str:
    first = ord("一") + 2 * draw.randrange(4000)
    return chr(first) + chr(first + 1)


def _random_events(draw: random.Random) -> list[Row]:
    events = {}
    for _ in range(draw.randint(1, 3)):
        reasons = {_word(draw) for _ in range(draw.randint(1, 3))}
        emotions = []
        for reason in sorted(reasons):
            emotion = {"state": draw.choice(SENTIMENTS), "reason": reason}
            emotions.append({**emotion, "source_id": draw.choice("123")})
        events[_word(draw)] = emotions
    return [{"event": name, "emotions": emotions} for name, emotions in events.items()]


def _damaged(gold: Row, draw: random.Random) -> Row:
    """Change texts and labels, and leave out parts."""
    for sentence in gold["sentences"]:
        is_none = sentence["sentiment"] == ""
        chance = draw.choice([0, 0.3, 1])
        if is_none and chance < 1:
            continue
        for field in SEXTUPLE:
            if draw.random() < chance:
                other = draw.choice(SENTIMENTS) if field == "sentiment" else _word(draw)
                sentence[field] = other
        if not is_none and draw.random() < 0.1:
            sentence.update(dict.fromkeys(SEXTUPLE, ""))
    for holder in gold["holders"]:
        for event in holder["events"]:
            for emotion in event["emotions"]:
                others = {"state": draw.choice(SENTIMENTS), "source_id": draw.choice("123")}
                for field, other in {**others, "reason": _word(draw)}.items():
                    if draw.random() < 0.3:
                        emotion[field] = other
            event["emotions"] = _some(event["emotions"], draw)
            if draw.random() < 0.2:
                event["event"] = _word(draw)
        holder["events"] = _some(holder["events"], draw)
    return {**gold, "holders": _some(gold["holders"], draw)}


def _some(items: list[Row], draw: random.Random) -> list[Row]:
    """Return most of the items, in another order."""
    kept = [item for item in items if draw.random() < 0.9]
    return draw.sample(kept, len(kept))


def _write_as_a_baseline(sentence: Row, draw: random.Random) -> None:
    """Give a sentence a form that the scripts read as they read the one it has."""
    if draw.random() < 0.3:
        del sentence["event"]
    response = sentence["final_model_response"]
    if not response:
        nothing: Any = draw.choice([[], {}, None, {"raw_response": "不知道"}, [{}]])
        sentence["final_model_response"] = nothing
        return
    [sextuple] = response
    if draw.random() < 0.3:
        sextuple["opinions"] = sextuple.pop("opinion")
    if draw.random() < 0.3:
        sentence["final_model_response"] = sextuple
