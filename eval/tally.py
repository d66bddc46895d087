"""What happened in decoding: counts, and the summary that is printed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_SHOWN_REFUSALS = 5
"""Refused examples that are printed; decode.json has all."""


@dataclass
class Tally:
    """Counts of what happened in decoding, over all examples of a run."""

    examples: int = 0
    calls: int = 0
    valid: int = 0
    repaired: int = 0
    unreadable: int = 0
    cut: int = 0
    refused: int = 0
    shortened: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    near_ties: int = 0
    loosened: int = 0
    skipped_rows: int = 0
    replies: int = 0
    decided: int = 0
    filled: int = 0
    pair_price: float | None = None
    class_prior: float | None = None
    classifier: Mapping[str, tuple[float, float]] | None = None
    decision_sha256: str | None = None
    fallback: str = "commonest labels"
    submission: Path = Path("submission.jsonl")
    repairs: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the summary that is printed."""
        calls = f" in {self.calls:,} calls" if self.calls != self.examples else ""
        yield (
            f"{self.examples} examples{calls}: {self.valid} first replies valid as they came, "
            f"{self.repaired} repaired, "
            f"{self.unreadable} unreadable (their answer: {self.fallback})"
        )
        yield (
            f"{self.cut} cut by length, {self.refused} could not be asked, "
            f"{self.shortened} shortened to fit"
        )
        if self.loosened:
            yield f"{self.loosened} asked under a simpler schema: llguidance refused the full one"
        if self.skipped_rows:
            yield f"{self.skipped_rows} bad rows were skipped, see skipped-test.jsonl"
        yield from (f"  id {line}" for line in self.refusals[:MAX_SHOWN_REFUSALS])
        if len(self.refusals) > MAX_SHOWN_REFUSALS:
            yield "  … all in decode.json"
        share = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0
        yield (
            f"{self.prompt_tokens:,} prompt tokens ({share:.0%} from the cache), "
            f"{self.completion_tokens:,} output tokens"
        )
        if self.decided:
            yield f"{self.decided} answers decided from {self.replies} replies{self._priors()}"
        if self.near_ties:
            yield f"{self.near_ties} greedy replies pass a near tie: another run may differ there"
        if self.filled:
            yield f"{self.filled} places of ranked answers filled up with the {self.fallback}"
        yield from (f"  {count:5d} × {kind}" for kind, count in self.repairs.most_common(8))

    def _priors(self) -> str:
        if self.pair_price is None or self.class_prior is None:
            return ""
        used = f", with the text classifier for {', '.join(self.classifier or ())}"
        priors = f", pair price {self.pair_price:g}, class prior {self.class_prior:g}"
        return priors + (used if self.classifier else "")
