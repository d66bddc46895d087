"""`panjue explain` prints why one case was answered in this way."""

import math
from collections.abc import Iterator, Sequence

from panjue.eval.agreement import NO_REPLY
from panjue.eval.baselines import fitted_on_these
from panjue.eval.cases_shown import CaseShown, cases_shown
from panjue.eval.field_why import FEATURES_READ, VOTE, FieldWhy, label_read
from panjue.eval.metric_values import submission_rows
from panjue.finetune.classifier.trees import CANDIDATES
from panjue.finetune.classifier.why import Most, TreeFeature, Why
from panjue.prompts.example import Example
from panjue.prompts.names import name_key
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field
from panjue.serve.answers import DEMO_ANSWERED, Answered
from panjue.serve.decoding import decoding_of, edited

MOST_REASONS = Most(words=5, sentences=5, of_classes=5, of_sets=5)

SHOWN_LENGTH = 70
"""Most characters of a sentence that are shown."""

CONTRIBUTES_FROM = 0.005
"""A contribution to log-odds that is nearer to 0 would be shown as 0.00, and is left out."""

INDENT = 22
"""Column where the reasons begin, after a heading such as `    sentences against`."""

ABOUT = (
    "This is what the text classifier sees, not how the model came to an answer of its own.",
    "Confidence is how likely exactly this answer is right; each label of a set stands alone.",
    "Contributions are log-odds. The linear model sets a label against all others; its words are",
    "one or two characters, words or numbers of the text, and of the clauses that name the person:",
    "[name] is any name, a number any of about its size. What the trees add is by TreeSHAP.",
)

ABOUT_MODEL = (
    "The model's own probability is how likely it was to write exactly this, of all that it might",
    "write. It is not how often such answers are right: the confidence estimates that.",
)


def explain(answered: Answered, key: str, person: str | None) -> Iterator[str]:
    """Yield the lines about the case with this id: about all its persons, or about one."""
    task = answered.task
    example = case_with_id(answered, key)
    rows = submission_rows(task, answered.folder)
    if rows.get(example.id) is None:
        raise UserError(f"{rows.path}: has no answer to id {key}")
    decoding = decoding_of(rows.path) or {}
    [case] = cases_shown(answered, decoding, [example], has_gold=False, most=MOST_REASONS)
    chosen = items_meant(task, case, person)
    yield f"{answered.folder}: id {key}"
    if answered.answers.is_of_demo:
        yield DEMO_ANSWERED
    has_reasons = any(why.reasons for whys in case.whys for why in whys)
    if not has_reasons:
        yield f"nothing to explain: {why_nothing(answered)}"
    elif training := fitted_on_these(answered):
        # Each training fits its own text classifier; an earlier one gives only the model's weights.
        known = "An earlier training of the model had these cases: the model"
        if answered.trained and training is answered.trained.record:
            known = "The text classifier was fitted on these cases: it"
        yield f"{known} is surer of them than of new ones."
    for number in chosen:
        yield from item_lines(answered, example, case, number)
    if has_reasons:
        yield from ("", *ABOUT)
    of_chosen = [case.whys[number] for number in chosen if case.whys]
    if any(why.logprob is not None for whys in of_chosen for why in whys):
        yield from ("", *ABOUT_MODEL)


def case_with_id(answered: Answered, key: str) -> Example:
    """Return the case with an id; UserError: there is none."""
    first = ""
    for example in answered.examples():
        if str(example.id) == key:
            return example
        first = first or f"; the first id is {example.id}"
    raise UserError(f"{answered.test}: has no case with the id {key}{first}")


def items_meant(task: Task, case: CaseShown, person: str | None) -> list[int]:
    """Return the numbers of a person's items, of all without a name; UserError: nobody has it."""
    names = [name for name, _ in case.items]
    if person is None:
        return list(range(len(names)))
    if not task.answer.items:
        raise UserError(f"id {case.id}: its answer is about no persons; leave --person out")
    found = [number for number, name in enumerate(names) if name_key(name) == name_key(person)]
    if not found:
        raise UserError(f"id {case.id}: has no person {person!r}, but {', '.join(names)}")
    return found


def why_nothing(answered: Answered) -> str:
    """Return why there are no reasons from a text classifier."""
    if n_voters := len(answered.record.voted):
        return f"the vote of {n_voters} runs has no text classifier of its own"
    if not answered.task.answer.fields:
        return f"the task {answered.record.task} has no labels that a text classifier knows"
    if answered.trained is None:
        return "no training answered, or it is not there any more"
    # If the training has changed since it answered, its classifier is not asked for reasons.
    return answered.changed or f"{answered.trained.folder} has no text classifier"


def item_lines(answered: Answered, example: Example, case: CaseShown, number: int) -> Iterator[str]:
    """Yield lines about one item of a case: the answer to each field, who gave it, and why."""
    name, fields = case.items[number]
    yield ""
    if name:
        yield name
    # The task has no decided fields. Then all fields have the same answerer.
    if not case.whys:
        for field in fields:
            yield f"{field.name}: {predicted_labels(field)}"
        by = "model"
        if answered.record.voted:
            by = VOTE
        elif edited(answered.task.data.submission.find(answered.folder)):
            by = ""  # nobody knows who answered
        yield f"  {answerer_in_words(by, answered)}"
        return
    opinions = case.opinions[number] if case.opinions else [None] * len(fields)
    by_field = zip(answered.task.answer.fields, fields, case.whys[number], opinions, strict=True)
    for field_name, field, why, opinion in by_field:
        yield f"{field.name}: {predicted_labels(field)}"
        who = answerer_in_words(why.by, answered)
        confidence = f" (confidence {why.confidence:.2f})" if why.confidence is not None else ""
        yield f"  {who}{confidence}{other_answer(why, opinion)}"
        if why.logprob is not None:
            whose = "this answer" if why.by == "model" else "its answer"
            own = f"{math.exp(why.logprob):.1%} (log-probability {why.logprob:.3g})"
            yield f"  the model's own probability of {whose}: {own}"
        yield from reason_lines(answered.task, field_name, example, why)


def predicted_labels(field: Field) -> str:
    """Return the labels of an answer in one field; an empty set is `nothing`."""
    return "、".join(field.predicted) or "nothing"


def answerer_in_words(by: str, answered: Answered) -> str:
    """Return who answered, from `FieldWhy.by`: `"model" -> "answered by the model"`."""
    known = {
        "": "nobody knows who answered",
        "model": "answered by the model",
        "classifier": "answered by the text classifier",
        VOTE: f"answered by the vote of {len(answered.record.voted)} runs",
    }
    return known.get(by, f"not in the model's reply; filled in with: {by}")


def other_answer(why: FieldWhy, opinion: tuple[Field, str] | None) -> str:
    """Return what the other one answered, if model or classifier gave the answer; else nothing.

    `opinion` is the answer that was not handed in, and a key of `AGREEMENTS`, such as `agree,
    right`, or `NO_REPLY`. It is None if only one of them has answered.
    """
    if why.by not in ("model", "classifier"):
        return ""
    if opinion is None:
        return "; the model was not asked" if why.by == "classifier" else ""
    field, how = opinion
    if how == NO_REPLY:
        return "; the model's reply has no answer"
    other = "model" if why.by == "classifier" else "text classifier"
    if how.startswith("agree"):
        return f"; the {other} says the same"
    return f"; the {other}'s answer, not used: {predicted_labels(field)}"


def reason_lines(task: Task, field: str, example: Example, why: FieldWhy) -> Iterator[str]:
    """Yield lines on a field: the classifier's likeliest labels, and reasons for those answered."""
    if why.reasons is None:
        return
    likeliest = []
    for label, chance in why.reasons.likeliest:
        likeliest.append(f"{label_read(task, field, label)} {chance:.1%}")
    yield f"  likeliest to the classifier: {', '.join(likeliest)}"
    for one in why.reasons.answered:
        yield f"  {label_read(task, field, one.label)}: {' → '.join(stages(one))}"
        words = [(f"{word.text} {word.contribution:+.2f}", word.contribution) for word in one.words]
        yield from for_and_against("words", words, "  ")
        sentences = []
        for start, end, contribution in one.sentences:
            sentence = " ".join(example.text[start:end].split())
            if len(sentence) > SHOWN_LENGTH:
                sentence = f"{sentence[:SHOWN_LENGTH]}……"
            sentences.append((f"{contribution:+.2f} {sentence}", contribution))
        yield from for_and_against("sentences", sentences, f"\n{' ' * INDENT}")
        features = []
        for feature in one.trees.features if one.trees else ():
            text = f"{feature_in_words(task, field, feature)} {feature.contribution:+.2f}"
            features.append((text, feature.contribution))
        yield from for_and_against("trees", features, "; ")


def stages(why: Why) -> Iterator[str]:
    """Yield each stage of a probability: `linear model +1.20 (…)`, …, `calibrated 79.2%`.

    If trees choose among the classes of a field, a softmax gives the probabilities of all classes,
    so that they sum to 1. Each other probability is calibrated alone.
    """
    yield f"linear model {why.score:+.2f} ({why.bias:+.2f} whatever the text)"
    trees = why.trees
    is_class = trees is not None and trees.scaled is None  # only labels of a set have `scaled`
    if trees and trees.scaled is not None:
        yield f"scaled {trees.scaled:+.2f}"
    if trees:
        yield f"trees {trees.given:+.2f} ({trees.average:+.2f} on average)"
    if why.is_left_out:
        yield f"not among the {CANDIDATES} labels that the trees look at"
    yield f"{'beside the other classes' if is_class else 'calibrated'} {why.before:.1%}"
    if why.known < 1 and why.frequency is not None:
        yield f"text known by {why.known:.0%}, frequency {why.frequency:.1%}: {why.probability:.1%}"


def for_and_against(what: str, parts: Sequence[tuple[str, float]], joint: str) -> Iterator[str]:
    """Yield lines of reasons for a label, then of reasons against it; the strongest come first.

    `what` names the kind of reasons: `words`. `parts` are texts with their contributions, from the
    strongest for the label to the strongest against it, as in `Why`. `joint` separates two texts;
    with a line break in it, each text gets its own line.
    """
    speaking_for = [text for text, contribution in parts if contribution >= CONTRIBUTES_FROM]
    against = [text for text, contribution in parts if contribution <= -CONTRIBUTES_FROM]
    against.reverse()
    for side, texts in (("for", speaking_for), ("against", against)):
        if texts:
            heading = f"    {what} {side}".ljust(INDENT)
            yield from f"{heading}{joint.join(texts)}".split("\n")


def feature_in_words(task: Task, field: str, feature: TreeFeature) -> str:
    """Return a feature of the trees for people: `rank in the case (2)`, `score: 盗窃罪 (1.3)`."""
    words, _ = FEATURES_READ.get(feature.name, (feature.name, ""))
    if feature.about:
        about, _ = FEATURES_READ.get(feature.about, (label_read(task, field, feature.about), ""))
        words += f": {about}"
    if feature.name == "label":  # `which label it is: 盗窃罪` says all; its value is a number
        return words
    return f"{words} ({feature.value:.4g})"
