"""What the tests of tasks share."""

import csv


def read_metrics(folder):
    """All columns of a run's metrics but the wall-clock seconds."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert float(row.pop("seconds")) > 0
    return rows
