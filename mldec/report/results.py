"""The numbers of a report in the form of `mldec.evaluate --json`, with their intervals."""

from typing import Any

from mldec.evaluation import Results
from mldec.evaluation.command import report
from mldec.report.content import Content
from mldec.report.meanings import is_count


def to_dict(content: Content, path: str, weights: str) -> dict[str, Any]:
    """Return metrics, per-class values and 95 % intervals, before `to_json`.

    Args:
        content: of the report.
        path: of the checkpoint.
        weights: "ema" or "raw".

    Returns:
        What `mldec.evaluate` writes, with "intervals", [low, high] by the name of the metric, and
        "AP_low" and "AP_high" in the entry of each class.
    """
    table = content.table
    per_class = {"f1" if name == "F1" else name: column for name, column in table.columns.items()}
    if table.intervals is not None:
        per_class["AP_low"], per_class["AP_high"] = table.intervals

    results = Results(
        metrics={name: interval.value for name, interval in content.metrics.items()},
        per_class=per_class,
        images=content.images,
        bad=content.unreadable,
        confusions=None,
    )
    return {
        **report(results, weights, path, table.names),
        "intervals": {
            name: [interval.low, interval.high]
            for name, interval in content.metrics.items()
            if not is_count(name)
        },
    }
