"""Polyphonic music: reading piano rolls, the mean of the loss, yardsticks, training and resuming."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from tasks.data import polyphonic
from tasks.data.download import find

# The data


def cell(rolls):
    """A Matlab cell array of piano rolls."""
    array = np.empty((1, len(rolls)), dtype=object)
    for index, roll in enumerate(rolls):
        array[0, index] = np.asarray(roll, dtype="uint8")
    return array


def rolls(*lengths):
    generator = np.random.default_rng(sum(lengths))
    return [generator.integers(0, 2, (length, 88)) for length in lengths]


PARTS = {"traindata": rolls(5, 3, 4), "validdata": rolls(2), "testdata": rolls(6, 2)}


def write(path, parts):
    path.parent.mkdir(parents=True, exist_ok=True)
    from scipy.io import savemat

    savemat(path, {name: cell(pieces) for name, pieces in parts.items()})


@pytest.mark.parametrize("folder", ["polyphonic", ""])
def test_files_are_read_piece_by_piece(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    write(tmp_path / folder / "JSB_Chorales.mat", PARTS)
    for name in ("auto", "jsb"):
        pieces, found = polyphonic.read_polyphonic(name)
        assert found == "jsb"
        for part, variable in zip(("train", "validation", "test"), PARTS, strict=True):
            assert [x.tolist() for x in pieces[part]] == [x.tolist() for x in PARTS[variable]]
            assert all(x.dtype == torch.uint8 for x in pieces[part])


@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("jsb", (229, 76, 77), (13_807, 4_602, 4_725)),
        ("nottingham", (694, 173, 170), (176_561, 45_513, 44_463)),
        ("piano", (87, 12, 25), (75_911, 8_540, 19_036)),
    ],
)
def test_the_real_pieces_when_they_are_there(name, sizes, steps):
    if not os.environ.get("HBNODE_DATA") or not find((polyphonic.FILES[name],), ("polyphonic", "")):
        pytest.skip("the pieces are not in HBNODE_DATA")
    pieces, _ = polyphonic.read_polyphonic(name)
    assert tuple(len(of_it) for of_it in pieces.values()) == sizes
    assert tuple(sum(map(len, of_it)) for of_it in pieces.values()) == steps


def test_missing_and_damaged_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    assert polyphonic.read_polyphonic()[1] == "generated"
    with pytest.raises(FileNotFoundError, match=r"polyphonic/Piano_midi\.mat is not in HBNODE_DATA=.*Fix: put Piano"):
        polyphonic.read_polyphonic("piano")
    with pytest.raises(ValueError, match="name must be one of auto, jsb, nottingham, piano, generated, got 'bach'"):
        polyphonic.read_polyphonic("bach")
    path = tmp_path / "polyphonic" / "Piano_midi.mat"
    for parts, message in (
        (PARTS | {"testdata": []}, "expected pieces in the cell array testdata, got none"),
        ({"traindata": PARTS["traindata"]}, "expected pieces in the cell array validdata, got none"),
        (PARTS | {"validdata": rolls(4, 1)}, r"got shape \(1, 88\) as number 1 of validdata"),
        (PARTS | {"validdata": [np.zeros((5, 87))]}, r"got shape \(5, 87\) as number 0 of validdata"),
        (PARTS | {"testdata": [np.full((5, 88), 2)]}, r"88 zeros and ones, got shape \(5, 88\)"),
    ):
        write(path, parts)
        with pytest.raises(ValueError, match=message + r".*Fix: put Piano_midi\.mat"):
            polyphonic.read_polyphonic("piano")
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"Piano_midi\.mat cannot be read"):
        polyphonic.read_polyphonic("piano")


def test_made_up_music_is_the_same_every_time():
    one, another = polyphonic.chords((4, 2, 1)), polyphonic.chords((4, 2, 1))
    assert [len(one[part]) for part in polyphonic.PARTS] == [4, 2, 1]
    for part in one:
        for x, y in zip(one[part], another[part], strict=True):
            assert torch.equal(x, y)
            assert 30 <= len(x) <= 60
            assert set(x.sum(1).tolist()) <= {3, 4}  # a triad, and a melody that may be in it
