"""Readable intervals. One case alone has no interval, because every draw is that case."""

from math import isnan

Ends = tuple[float | None, float | None]
"""The ends of a 95% interval; None or NaN if there is none."""

NO_INTERVAL = "-"


def interval_text(ends: Ends, form: str = ".4f", between: str = " - ") -> str:
    """Return an interval as text; `NO_INTERVAL` if there is none."""
    low, high = ends
    if low is None or high is None or isnan(low) or isnan(high):
        return NO_INTERVAL
    return f"{low:{form}}{between}{high:{form}}"


def with_interval(mean: float, ends: Ends, form: str = ".4f", between: str = " - ") -> str:
    """Return a mean as text, with its interval in brackets if there is one."""
    interval = interval_text(ends, form, between)
    return f"{mean:{form}}" + (f" ({interval})" if interval != NO_INTERVAL else "")
