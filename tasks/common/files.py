"""Read and write the files of runs. Each file is first written under a temporary name, so it is never half written."""

from __future__ import annotations

import csv
import io
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

NEW_FOLDER = "Fix: delete its folder and run again, or --out another-folder."


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file written there then replaces ``path``; after an error ``path`` is unchanged."""
    partial = path.with_name(f"{path.name}.partial{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never half written."""
    with written_whole(path) as partial:
        partial.write_bytes(content)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object. Numbers that are not finite become null, because JSON has none."""
    write_whole(path, json.dumps(_finite(content), indent=2).encode())


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as a CSV file. The keys of the first row are the column names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table. The keys of the first row are the column names."""
    lines = [list(rows[0]), *([str(entry) for entry in row.values()] for row in rows)]
    header, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *others])


def write_figure(figure: Figure, path: Path) -> None:
    """Save a figure in the format of the file's suffix, and close it."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png", dpi=130)
    plt.close(figure)
    write_whole(path, buffer.getvalue())


def write_tensors(path: Path, content: Mapping[Any, object]) -> None:
    """Write a dictionary in the format that :func:`read_tensors` reads."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_whole(path, buffer.getvalue())


def read_tensors(path: Path) -> dict[Any, Any]:
    """Read a dictionary of tensors, numbers, strings and containers. Other objects are rejected when unpickling."""
    with exit_on(ValueError), readable(path, NEW_FOLDER):
        content: dict[Any, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    with exit_on(ValueError), readable(path, NEW_FOLDER):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@contextmanager
def readable(path: Path | str, fix: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turn every exception into a ValueError that names the file, because damaged files cause many kinds of exceptions.

    Arguments:
        path: the file.
        fix: advice in the error message.
        problem: what is wrong with the file, in the error message.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} {problem} ({type(error).__name__}: {error}). {fix}") from error


@contextmanager
def exit_on(*errors: type[Exception]) -> Iterator[None]:
    """If one of these errors occurs, end the process with its message and without a traceback."""
    try:
        yield
    except errors as error:
        raise SystemExit(str(error)) from error
