"""What the results of diagnostics share."""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Result(ABC):
    """Data that writes itself to a file."""

    @abstractmethod
    def columns(self) -> dict[str, Sequence[Any]]:
        """The data as columns of equal length, by name."""

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the columns to ``path``. The file appears whole or not at all."""
        path = Path(path)
        columns = self.columns()
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        partial.replace(path)
