"""What the rows of a study say about a claim: shared by the studies of this folder."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

# A difference in points that table 1 calls none: mAP 88.0 with 20 queries, 88.1 with 80.
NO_DIFFERENCE = 0.1


class Claim(NamedTuple):
    """A claim of the paper on two rows: the first is better than the second, or as good."""

    text: str
    first: str
    second: str
    better: bool


def judge(claim: Claim, rows: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Test a claim on the differences of its two rows, seed by seed.

    The spread is two standard errors of their mean, and at least `NO_DIFFERENCE`.

    Args:
        claim: about two rows.
        rows: the metric of each row by its name and the seed.

    Returns:
        The fields of the claim, the difference, its spread, and the verdict.
    """
    first, second = rows[claim.first], rows[claim.second]
    # Paired by seed, so that what both runs have in common does not add to the spread.
    differences = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
    if len(differences) < 2:
        return {**claim._asdict(), "difference": None, "spread": None, "verdict": "not run"}

    mean = statistics.fmean(differences)
    standard_error = statistics.stdev(differences) / len(differences) ** 0.5
    spread = max(NO_DIFFERENCE, 2 * standard_error)

    if mean > spread:
        verdict = "holds"
    elif mean < -spread:
        verdict = "does not hold"
    else:
        # That two rows are as good needs a margin that is set before the runs; there is none here.
        verdict = "open: within the spread"
    return {**claim._asdict(), "difference": mean, "spread": spread, "verdict": verdict}


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """Return the line of a verdict for the terminal."""
    line = f"{verdict['verdict']:<24} {verdict['text']}"
    if verdict["difference"] is not None:
        line += f" ({verdict['difference']:+.2f}, spread {verdict['spread']:.2f})"
    return line
