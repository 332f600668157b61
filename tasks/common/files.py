"""Files of runs: written atomically, checked when read; one process writes to a folder."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import os
import typing
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows: folders are not locked
    fcntl = None  # type: ignore[assignment]  # the name of a module otherwise

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".csv", ".gif", ".json", ".png", ".pt")  # of files that a run writes
SEAL = b"sha256:"


class FolderLock:
    """Keeps other processes out of a folder, which it makes, until it is released or this process ends.

    The lock is the operating system's, on the file ``.lock`` in the folder, so that a killed process leaves none
    behind; the file stays. On a file system that has no locks the folder is open to all.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SystemExit(write_error(folder, error)) from error
        self._close = weakref.finalize(self, os.close, file)
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self.release()
            raise SystemExit(
                f"another process is writing to {folder}. Fix: wait for it or stop it, or --out another-folder."
            ) from error
        except OSError as error:
            logging.getLogger(__name__).warning("%s is not locked: %s", folder, error.strerror)

    def release(self) -> None:
        """Let others in."""
        self._close()


def outputs(folder: Path) -> set[str]:
    """Return names of the files in a folder that are of the kinds that a run writes."""
    return {path.name for path in folder.iterdir() if path.suffix in KINDS and ".partial" not in path.name}


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to instead: when all is written, the file moves to ``path``, whose folder is made.

    Whenever the process ends, ``path`` is the new file or what it was before; a failed write ends it with a sentence.
    """
    partial = path.with_name(f"{path.name}.partial{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise SystemExit(write_error(path, error)) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the process ends."""
    with written_whole(path) as partial:
        partial.write_bytes(content)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object, whole or not at all; numbers of it that are not finite, which JSON lacks, are null."""
    write_whole(path, json.dumps(_finite(content), indent=2).encode())


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as CSV, whole or not at all; the first has the names of the columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a table in Markdown; the first has the names of the columns."""
    lines = [list(rows[0]), *([str(entry) for entry in row.values()] for row in rows)]
    header, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *others])


def write_figure(figure: Figure, path: Path) -> None:
    """Save a figure, in the format that its name says, whole or not at all, and close it."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png", dpi=130)
    plt.close(figure)
    write_whole(path, buffer.getvalue())


def write_tensors(path: Path, content: Mapping[Any, object]) -> None:
    """Write what ``torch.load`` reads, whole or not at all."""
    write_whole(path, _archive(content))


def write_checkpoint(path: Path, checkpoint: dict[str, object]) -> None:
    """Write a checkpoint with its SHA-256 as the comment of the zip archive that it is: torch verifies nothing."""
    archive = _archive(checkpoint)
    seal = SEAL + hashlib.sha256(archive).hexdigest().encode()
    write_whole(path, archive[:-2] + len(seal).to_bytes(2, "little") + seal)


def _archive(content: Mapping[Any, object]) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def read_checkpoint(path: Path, task: str, model: str) -> dict[str, Any]:
    """Return a checkpoint, or end with a message if it is damaged or another task's or model's."""
    try:
        checkpoint = torch.load(io.BytesIO(verify(path.read_bytes())), map_location="cpu", weights_only=True)
        found = {name: checkpoint[name] for name in ("task", "model_name")}
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise SystemExit(damaged(path, f"cannot be read ({error})")) from error
    for name, wanted in (("task", task), ("model_name", model)):
        if found[name] != wanted:
            raise SystemExit(
                f"{path} is a checkpoint of {name}={found[name]!r}; expected {wanted!r}. Fix: --out another-folder."
            )
    return checkpoint


def verify(content: bytes) -> bytes:
    """Return a checkpoint's bytes if they are those that were written; of one that was not sealed this is not known."""
    archive, seal = content[: -len(SEAL) - 64], content[-len(SEAL) - 64 :]
    if seal.startswith(SEAL):
        digest = hashlib.sha256(archive[:-2] + bytes(2)).hexdigest()  # without the comment's length
        if seal != SEAL + digest.encode():
            raise ValueError(f"its SHA-256 is {digest}, not the one written into it: its bytes have changed")
    return content


def damaged(path: Path, why: str) -> str:
    """Return what to say of a file of a run that cannot be used."""
    return f"{path} {why}. Fix: delete its folder and run anew, or --out another-folder."


def write_error(path: Path, error: OSError) -> str:
    """Return what to say of a file or folder that cannot be written."""
    why = error.strerror or error
    return f"{path} cannot be written: {why}. Fix: make room or allow it and run again, or --out another-folder."


@contextmanager
def exit_on(*errors: type[Exception]) -> Iterator[None]:
    """Within it these errors end the process with their message, and without a traceback."""
    try:
        yield
    except errors as error:
        raise SystemExit(str(error)) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or end with a message that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(damaged(path, f"cannot be read ({error})")) from error
    if not isinstance(content, dict):
        raise SystemExit(damaged(path, "holds no JSON object"))
    return content
