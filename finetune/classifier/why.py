"""Why the text classifier gives a label its probability: words, sentences, features of the trees.

The linear model computes the log-odds of a label against all others: `bias` plus, for each n-gram
of the case and of the item's own clauses, its TF-IDF times a weight. The trees see these scores,
the scores of the whole case, and facts about the item. They correct the log-odds of a label of a
set, or choose among classes. Last, the probability moves towards the label's frequency; the less of
the text is `known` from training, the more. All this holds for the classifier that answers new
cases. Opinions on its training cases come from classifiers that were fitted without them.

The n-grams of a text have an order: all tokens, all pairs of neighbors, then the tokens for the
position of an item in its list. Only some n-grams have a weight: those kept in training. In a
marked case, each name is one character: `FIRST_NAME` plus its number.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.sparse import csc_array, csr_array

from panjue.finetune.classifier.classifier import Classifier, Seen
from panjue.finetune.classifier.features import MANY_PERSONS, PLACES, Array, MarkedCase, View
from panjue.finetune.classifier.grams import FIRST_NAME, Hashes, Text, places_among, token_places
from panjue.finetune.classifier.label_sets import LabelField
from panjue.finetune.classifier.trees import FieldTrees, Items, candidates, class_rows
from panjue.prompts.example import Example
from panjue.prompts.plain import Edit, Rewritten
from panjue.prompts.shorten import split_sentences
from panjue.prompts.tasks.evidence import WORDS, evidence

if TYPE_CHECKING:
    import lightgbm

OWN_NAME = "[this person]"
ANY_NAME = "[name]"
"""Replace the name of the item's own person in a word of its own clauses, and any other name."""

OF_MONEY = ("largest amount of money", "sum of money", "amounts of money")
OF_WEIGHT = ("largest weight", "sum of weights", "weights")
EVIDENCE = (*OF_MONEY, *OF_WEIGHT, "acts", "dates", *WORDS)
"""Names of the numbers that `prompts.tasks.evidence` reads from a text; sizes are log10."""

LIKELIEST = 3

EVERY_CASE = "[every case]"
"""Replaces the position in the list if answers have no list; then all cases have the same."""


class Word(NamedTuple):
    """One or two tokens of the text, or in brackets the position of the item in its case."""

    text: str
    contribution: float  # to the log-odds of the linear model


class Sentence(NamedTuple):
    """A sentence of the example's text; a pair of tokens belongs to the one where it begins."""

    start: int
    end: int
    contribution: float  # sum of the shares of its words, each as often as it occurs in it


class TreeFeature(NamedTuple):
    """A feature of the trees. `about` is the label or word that it is about, or empty."""

    name: str
    about: str
    value: float
    contribution: float  # to what the trees add: LightGBM's `pred_contrib`, which is TreeSHAP


@dataclass(frozen=True)
class TreesSay:
    """What the trees add to the score of a label."""

    scaled: float | None  # the scaled score of the linear model, which they correct; None: a class
    given: float  # what they add to it; for a class, its raw score before the softmax
    average: float  # the part of `given` that does not depend on the item; the rest is of features
    features: Sequence[TreeFeature]


@dataclass(frozen=True)
class Why:
    """Why a label has its probability.

    Words, sentences and features that speak most for the label come first, the strongest first.
    Then come those that speak most against it, the strongest last.
    """

    label: str
    score: float  # log-odds by the linear model: `bias` plus the contributions of all words
    bias: float
    words: Sequence[Word]
    sentences: Sequence[Sentence]
    trees: TreesSay | None  # None without trees, or if they do not look at the label
    is_left_out: bool  # whether the field has trees, but they do not look at the label
    before: float  # the probability before it moves towards `frequency`
    known: float  # how far the text is known, from 0 to 1; the less, the more it moves
    frequency: float | None  # share of the label in training; None in files of version 0.4
    probability: float


@dataclass(frozen=True)
class FieldReasons:
    """The classifier's likeliest labels for a field of an item, and its reasons."""

    likeliest: Sequence[tuple[str, float]]  # at most `LIKELIEST` labels with their probabilities
    answered: Sequence[Why]  # for the answered labels that it knows


class Most(NamedTuple):
    """Limits of how many reasons are returned for a label, and how many against it."""

    words: int
    sentences: int
    of_classes: int  # features of trees that choose among classes
    of_sets: int  # features of trees that correct the labels of a set


def reasons(
    classifier: Classifier,
    examples: Sequence[Example],
    answered: Sequence[Sequence[Mapping[str, Iterable[str]]]],
    most: Most,
) -> list[list[dict[str, FieldReasons]]]:
    """Return for each item of each example: field -> likeliest labels, reasons of those answered.

    Give at most some hundred examples at once, to bound memory. `answered` has for each example a
    list with one mapping for each item: field -> answered labels. `most` limits the reasons;
    `of_sets=0` saves much time.
    """
    if not examples:
        return []
    seen = classifier.look_at(examples)
    before = classifier.by_both_stages(seen.items)  # before they move towards the frequencies
    grams_of_items = list(_grams_of_items(classifier, examples, seen))
    labels_of_items = list(chain.from_iterable(answered))
    of_items: list[dict[str, FieldReasons]] = [{} for _ in labels_of_items]
    first_column = 0  # column of the field's first label among the labels of all fields
    for name, of_field in classifier.fields.items():
        probabilities = of_field.as_far_as_known(before[name], seen.known)
        numbers = {label: number for number, label in enumerate(of_field.labels)}
        wanted = []  # pairs: an item, and the number of a label that was answered for it
        for item, labels in enumerate(labels_of_items):
            wanted += [(item, numbers[label]) for label in labels[name] if label in numbers]
        of_trees = _trees_say(classifier, seen.items, name, before, wanted, most)
        whys: list[list[Why]] = [[] for _ in of_items]
        for item, number in wanted:
            column = first_column + number
            words, sentences = grams_of_items[item].strongest(classifier, column, most)
            why = Why(
                label=of_field.labels[number],
                score=float(seen.items.scores[name][:, item, number].sum()),  # of both views
                bias=float(classifier.bias[column]),
                words=words,
                sentences=sentences,
                trees=of_trees.get((item, number)),
                is_left_out=name in classifier.second and (item, number) not in of_trees,
                before=float(before[name][item, number]),
                known=float(seen.known[item]),
                frequency=of_field.frequencies[number] if of_field.frequencies else None,
                probability=float(probabilities[item, number]),
            )
            whys[item].append(why)
        for item, likeliest in enumerate(_likeliest(of_field, probabilities)):
            of_items[item][name] = FieldReasons(likeliest, whys[item])
        first_column += len(of_field.labels)
    by_item = iter(of_items)
    return [list(islice(by_item, size)) for size in seen.items.sizes.tolist()]


def _likeliest(of_field: LabelField, probabilities: Array) -> Iterator[list[tuple[str, float]]]:
    """Yield the likeliest labels of each item, of equal ones the first by name."""
    by_name = np.array(sorted(range(len(of_field.labels)), key=of_field.labels.__getitem__), int)
    order = np.argsort(-probabilities[:, by_name], axis=1, kind="stable")[:, :LIKELIEST]
    for of_item, numbers in zip(probabilities, by_name[order], strict=True):
        yield [(of_field.labels[number], float(of_item[number])) for number in numbers]


def strongest(contributions: Array, most: int) -> list[int]:
    """Return the places of the `most` largest numbers above 0, then of the `most` smallest below.

    For example, with `most` 1, of the numbers 2, 0, 3, -1 these are the places 2 and 3.
    """
    nonzero = np.flatnonzero(contributions)
    order = nonzero[np.argsort(-contributions[nonzero], kind="stable")]
    n_for = int((contributions > 0).sum())
    largest = order[: min(most, n_for)].tolist()
    smallest = order[max(n_for, len(order) - most) :].tolist()
    return [*largest, *smallest]


@dataclass(frozen=True)
class _Grams:
    """The n-grams of one text that have a weight, and their places."""

    hashes: Hashes  # of distinct n-grams, ascending, [kept]
    columns: Array  # their columns in the view, [kept]
    values: Array  # their values in the text's vector, [kept]
    text: Text  # with its position in readable form
    tokens: Sequence[tuple[int, int]]  # start and end of each in the text
    occurrences: Array  # number in `hashes` of each n-gram of the text, or -1
    places: Array  # for each token and pair with a weight, the number in `hashes`, [places]
    sentences: Array  # the number of its sentence, [places]
    shares: Array  # one divided by how often the text has this n-gram, [places]

    def contributions(
        self, of_view: csc_array, column: int, n_sentences: int
    ) -> tuple[Array, Array]:
        """Return what n-grams, [kept], and sentences contribute to the log-odds of a label.

        `column` is that of the label in the weights of this text's view, `of_view`. An n-gram that
        the text has three times contributes a third at each of its places.
        """
        of_grams = self.values * _weights(of_view, column, self.columns)
        of_places = of_grams[self.places] * self.shares  # `places` has the n-gram at each place
        return of_grams, np.bincount(self.sentences, of_places, minlength=n_sentences)

    def text_of(self, hashed: int) -> str | None:
        """Return the readable form of an n-gram at its first place; None if the text lacks it."""
        number = int(np.searchsorted(self.hashes, hashed))
        if number == len(self.hashes) or self.hashes[number] != hashed:
            return None
        place = int(np.argmax(self.occurrences == number))  # among tokens, pairs and position
        n_tokens = len(self.tokens)
        n_pairs = max(0, n_tokens - 1)
        if place < n_tokens:
            return self._token(place)
        if place >= n_tokens + n_pairs:
            return self.text.position[place - n_tokens - n_pairs]
        first = self._token(place - n_tokens)
        second = self._token(place - n_tokens + 1)
        return f"{first} {second}" if _is_word(first) and _is_word(second) else first + second

    def _token(self, number: int) -> str:
        """Return a token in readable form: `OWN_NAME` or `ANY_NAME` for a name."""
        start, end = self.tokens[number]
        token = self.text.text[start:end]
        name = ord(token[0]) - FIRST_NAME  # its number, if this is a name
        if 0 <= name < self.text.names:
            return OWN_NAME if name == self.text.own else ANY_NAME
        return token.lower()


def _is_word(token: str) -> bool:
    """Say whether a token is a word of a script with spaces, and no character, name or number."""
    return token[0].isalpha() and not "\u4e00" <= token[0] <= "\u9fff"


class _ItemGrams:
    """The n-grams of an item: of the whole case, and of its own clauses."""

    def __init__(
        self, of_case: _Grams, of_own: _Grams, sentences: Sequence[tuple[int, int]]
    ) -> None:
        self._texts = (of_case, of_own)
        self._sentences = sentences  # start and end of each
        # An n-gram of both texts is one word. `_numbers` has the number of its word for each n-gram
        # of the case, then for each of the own clauses.
        hashes = np.concatenate([of_case.hashes, of_own.hashes])
        self._hashes, self._numbers = np.unique(hashes, return_inverse=True)
        if EVERY_CASE in of_own.text.position:
            # Without a list, the three tokens of the position all read `EVERY_CASE`. So those with
            # a weight become one word: they get the word number of the first of them. They are the
            # last of `occurrences`, which has places in `of_own.hashes`, or -1 without a weight.
            of_position = of_own.occurrences[-len(of_own.text.position) :]
            with_weight = len(of_case.hashes) + of_position[of_position >= 0]
            self._numbers[with_weight] = self._numbers[with_weight[:1]]  # nothing if all are -1

    def strongest(
        self, classifier: Classifier, column: int, most: Most
    ) -> tuple[list[Word], list[Sentence]]:
        """Return the words and sentences that speak most for and against a label, in both texts.

        `column` is that of the label in the classifier's weights.
        """
        by_text = []
        by_sentence = np.zeros(len(self._sentences))
        for text, of_view in zip(self._texts, classifier.weights_by_label, strict=True):
            of_grams, in_sentences = text.contributions(of_view, column, len(by_sentence))
            by_text.append(of_grams)
            by_sentence += in_sentences
        # `_numbers` has the word of each n-gram of the case, then of the own clauses.
        by_word = np.bincount(self._numbers, np.concatenate(by_text), minlength=len(self._hashes))
        words = []
        for number in strongest(by_word, most.words):
            read = (text.text_of(self._hashes[number]) for text in self._texts)
            words.append(Word(next(filter(None, read)), float(by_word[number])))
        sentences = []
        for number in strongest(by_sentence, most.sentences):
            sentences.append(Sentence(*self._sentences[number], float(by_sentence[number])))
        return words, sentences


def _grams_of_items(
    classifier: Classifier, examples: Sequence[Example], seen: Seen
) -> Iterator[_ItemGrams]:
    """Yield for each item of all examples the n-grams of its case and of its own clauses.

    Each n-gram gets its sentence in the example's text. `seen` has the hashes of all n-grams, and
    as `rows` the vectors of those with a weight.
    """
    hashes_of_cases, hashes_of_items = seen.hashes
    rows_of_cases, rows_of_items = seen.rows
    text_view, own_view = classifier.views
    item = 0  # number of the item among those of all examples
    for number, (example, case) in enumerate(zip(examples, seen.cases, strict=True)):
        lengths = map(len, split_sentences(example.text, None, example.names))
        bounds = list(pairwise(accumulate(lengths, initial=0)))
        starts = [start for start, _ in bounds]
        # For each character of `case.text`, the number of its sentence. It is found by the place of
        # the character in the text of the example: the last sentence that starts at it or before.
        sentences = np.searchsorted(starts, _places_in_text(case), side="right") - 1
        text = Text(case.text, case.names)
        of_case = _grams(text_view, rows_of_cases, number, hashes_of_cases[number], text, sentences)
        for person, own in enumerate(case.own):
            position = position_read(person, len(case.own))
            if not classifier.label_fields.items:  # no list, so the position is always the same
                position = (EVERY_CASE,) * len(position)
            text = Text(own, case.names, case.persons[person], position)
            of_clauses = [sentences[start:end] for start, end in case.own_bounds[person]]
            # The first part is empty: there may be no clause, and NumPy joins at least one part.
            in_clauses = np.concatenate([sentences[:0], *of_clauses])
            of_own = _grams(own_view, rows_of_items, item, hashes_of_items[item], text, in_clauses)
            yield _ItemGrams(of_case, of_own, bounds)
            item += 1


def _grams(
    view: View, rows: csr_array, number: int, hashes: Hashes, text: Text, sentences: Array
) -> _Grams:
    """Read a text from its vector, the row of this number, and the hashes of all its n-grams.

    The tokens of the item's position, which `hashes` has in another form, are readable in `text`.
    `sentences` has the sentence of each character. For example, if a text has the n-grams a, b, c,
    a, and b has no weight, then a is number 0, c is number 1, `occurrences` is 0, -1, 1, 0,
    `places` is 0, 1, 0, and `shares` is 1/2, 1, 1/2.
    """
    part = slice(*rows.indptr[number : number + 2])  # slices of a sparse array itself are slow
    columns = rows.indices[part]
    kept = view.kept[columns]  # the hashes of the text's n-grams with a weight, ascending
    numbers, have_weight = places_among(kept, hashes)
    occurrences = np.where(have_weight, numbers, -1)
    tokens = token_places(text.text)
    of_tokens = sentences[np.array([start for start, _ in tokens], int)]
    of_grams = np.concatenate([of_tokens, of_tokens[:-1]])  # a pair is where its first token is
    in_sentence = have_weight[: len(of_grams)]  # the position, which comes last, is in none
    places = numbers[: len(of_grams)][in_sentence]
    times = np.bincount(places, minlength=len(kept))
    return _Grams(
        hashes=kept,
        columns=columns,
        values=rows.data[part].astype(float),
        text=text,
        tokens=tokens,
        occurrences=occurrences,
        places=places,
        sentences=of_grams[in_sentence],
        shares=1 / times[places],
    )


def _places_in_text(case: MarkedCase) -> Array:
    """Return for each character of a marked case the place in the text of its example.

    The text was rewritten twice: `plain_text` made a plain text from that of the example, and
    `marked` replaced each name in the plain text by one character.
    """
    edits = []
    removed = 0  # how much shorter the names so far have become
    for start, end, _ in case.name_places:
        new_start = start - removed
        edits.append(Edit(new_start, new_start + 1, old_start=start, old_end=end))
        removed += end - start - 1
    in_plain = _old_starts(Rewritten(case.text, tuple(edits)))  # places in the plain text
    in_text: Array = _old_starts(case.plain)[in_plain]
    return in_text


def _old_starts(rewritten: Rewritten) -> Array:
    """Return the place before the edits of each character, as `Rewritten.old_start` does of one."""
    places = np.arange(len(rewritten.text))
    for edit in rewritten.edits:
        places[edit.start : edit.end] = edit.old_start
        places[edit.end :] = np.arange(len(places) - edit.end) + edit.old_end
    return places


def position_read(number: int, items: int) -> tuple[str, ...]:
    """Return what `features.views` writes of an item's position, in readable form."""
    place = f"no. {number + 1}" if number < MANY_PERSONS - 1 else f"{MANY_PERSONS}th or later"
    of = f"{items}" if items < MANY_PERSONS else f"{MANY_PERSONS} or more"
    last = "last" if number == items - 1 else "not last"
    return (f"[{place} in the list]", f"[{of} in the list]", f"[{last} in the list]")


def _weights(of_view: csc_array, column: int, wanted: Array) -> Array:
    """Return the weights of a label for some n-grams, given by their columns in the view.

    `column` is that of the label in `of_view`, [n-grams of the view, labels].
    """
    part = slice(*of_view.indptr[column : column + 2])
    places, have_weight = places_among(of_view.indices[part], wanted)
    result = np.zeros(len(wanted))
    result[have_weight] = of_view.data[part][places[have_weight]]
    return result


def _trees_say(
    classifier: Classifier,
    items: Items,
    name: str,
    before: Mapping[str, Array],
    wanted: Sequence[tuple[int, int]],
    most: Most,
) -> dict[tuple[int, int], TreesSay]:
    """Return what a field's trees add to the scores of `wanted` pairs of an item and a label.

    Pairs whose label the trees of a set do not look at are absent. `before` has the probabilities
    of the label sets, which the trees of a class see.
    """
    of_field = classifier.second.get(name)
    if of_field is None or not wanted:
        return {}
    if of_field.is_set:
        labels = classifier.fields[name].labels
        return _corrections(of_field, items, name, labels, wanted, most.of_sets)
    rows = class_rows(items, name, before, of_field.classes)
    features = class_features(classifier, name, rows.shape[1])
    by_class = trees_of_classes(of_field.trees)
    items_of: dict[int, list[int]] = defaultdict(list)  # class -> the items wanted with it
    for item, number in wanted:
        items_of[number].append(item)
    result = {}
    for number, of_class in items_of.items():
        parts = by_class[number].predict(rows[of_class], pred_contrib=True, num_threads=1)
        for item, contributions in zip(of_class, parts, strict=True):
            given = float(contributions.sum())
            average = float(contributions[-1])  # after those of the features, LightGBM adds it
            strong = _strongest_features(contributions, features, rows[item], most.of_classes)
            result[item, number] = TreesSay(
                scaled=None,  # trees of a class correct no score
                given=given,
                average=average,
                features=strong,
            )
    return result


@lru_cache(maxsize=4)
def trees_of_classes(trees: "lightgbm.Booster") -> "list[lightgbm.Booster]":
    """Return the trees of each class alone, which give the same contributions in less time.

    They are cut out of LightGBM's text format, where the trees of all classes take turns.
    """
    import lightgbm

    classes = trees.num_model_per_iteration()
    model, _ = trees.model_to_string().split("end of trees")
    head, *all_trees = model.split("\nTree=")
    lines = []
    for line in head.splitlines():
        name, _, _ = line.partition("=")
        if name in ("num_class", "num_tree_per_iteration"):
            lines.append(f"{name}=1")
        elif name not in ("objective", "tree_sizes"):
            lines.append(line)
    apart = []
    for number in range(classes):
        of_class = [*lines]
        for place, tree in enumerate(all_trees[number::classes]):
            _, after_number = tree.split("\n", 1)
            of_class += [f"\nTree={place}", after_number]
        apart.append(lightgbm.Booster(model_str="\n".join([*of_class, "end of trees\n"])))
    return apart


def _corrections(
    of_field: FieldTrees,
    items: Items,
    name: str,
    labels: Sequence[str],
    wanted: Sequence[tuple[int, int]],
    most: int,
) -> dict[tuple[int, int], TreesSay]:
    """Return what the trees of a label set add to the scores of `wanted` pairs.

    A pair is an item and the number of a label in `labels`. The trees look only at candidates, the
    likeliest labels of an item, so other pairs are absent.
    """
    found = candidates(items, name)
    pairs = zip(found.item.tolist(), found.label.tolist(), strict=True)
    are_wanted = set(wanted)
    row_of = {pair: row for row, pair in enumerate(pairs) if pair in are_wanted}
    if not row_of:
        return {}
    wanted_rows = [*row_of.values()]
    rows = found.rows[wanted_rows]
    scaled = found.logits(of_field.scaling)[wanted_rows].tolist()
    added = of_field.trees.predict(rows, raw_score=True, num_threads=1).tolist()
    # If no feature is shown, one row is enough: it has the average, which is the same for all.
    explained = rows if most else rows[:1]
    contributions = of_field.trees.predict(explained, pred_contrib=True, num_threads=1)
    average = float(contributions[0, -1])
    _, *others = [(column, "") for column in found.columns]  # the first one is the label
    result = {}
    for place, (item, number) in enumerate(row_of):
        strong: Sequence[TreeFeature] = ()
        if most:
            features = [("label", labels[number]), *others]
            strong = _strongest_features(contributions[place], features, rows[place], most)
        result[item, number] = TreesSay(scaled[place], added[place], average, strong)
    return result


def _strongest_features(
    contributions: Array, features: Sequence[tuple[str, str]], values: Array, most: int
) -> list[TreeFeature]:
    """Return the features that contribute most; the last contribution is the average."""
    strong = []
    for number in strongest(contributions[:-1], most):
        value = float(values[number])
        strong.append(TreeFeature(*features[number], value, float(contributions[number])))
    return strong


def class_features(classifier: Classifier, name: str, count: int) -> list[tuple[str, str]]:
    """Return for each of the `count` columns of `class_rows` its name, and what it is about.

    First come the scores of the classes. Then, for each label set, come the shares of the classes
    to expect with the item's labels of this set. Last come the `PLACES`, and the evidence in the
    whole text and in the own clauses.
    """
    labels = classifier.fields[name].labels
    features = [("score", label) for label in labels]
    for other in classifier.second[name].classes:
        features += [(f"as usual for the {other}", label) for label in labels]
    features += [(place, "") for place in PLACES]
    # The remaining columns are evidence: half in the whole text, half in the own clauses.
    n_evidence = (count - len(features)) // 2
    # A task may read its evidence with a function of its own. `EVIDENCE` does not name its numbers.
    is_known = classifier.label_fields.evidence is evidence
    about = EVIDENCE if is_known else [f"evidence {number}" for number in range(n_evidence)]
    for where in ("whole text", "own clauses"):
        features += [(where, one) for one in about]
    return features
