"""Polyphonic music: reading piano rolls, the mean of the loss, yardsticks, training and resuming."""

import json
import os

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from tasks import polyphonic_music
from tasks.common.optimizers import OPTIMIZERS
from tasks.data import polyphonic
from tasks.data.download import find
from tasks.models.next_step import TITLES, NextStep
from tests.tasks.small_runs import names_in, read_metrics

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


# Parts and means


def some_pieces(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, (length, 88), generator=generator).to(torch.uint8) for length in lengths]


def test_every_step_but_the_first_is_predicted_in_one_part():
    pieces = some_pieces(12, 11, 2, 6)
    for piece in pieces:  # whose first note counts its steps
        piece[:, 0] = torch.arange(len(piece))
    parts = polyphonic_music.parts_of(pieces, 5)
    assert [len(x) for x in parts] == [6, 6, 2, 6, 6, 2, 6]
    assert [x[1:, 0].tolist() for x in parts[:3]] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11]]
    whole = polyphonic_music.parts_of(pieces, 0)
    assert all(torch.equal(x, y) for x, y in zip(whole, pieces, strict=True))


def test_the_means_are_over_steps_and_over_pieces_and_padding_counts_nowhere():
    pieces = some_pieces(9, 4, 2, 7)
    model = torch.nn.Linear(88, 88)
    objective = polyphonic_music.NextNotes()
    sums = []
    for piece in pieces:
        before, after = piece[:-1].float(), piece[1:].float()
        sums.append(torch.nn.functional.binary_cross_entropy(model(before).sigmoid(), after, reduction="sum").item())
    steps = [8, 3, 1, 6]
    batch = polyphonic_music.as_batch(pieces)
    loss, means = objective(model, batch)
    assert loss.item() == pytest.approx(sum(sums) / 4, rel=1e-5)
    assert means["nll"] == pytest.approx(sum(sums) / sum(steps), rel=1e-5)
    by_piece = sum(x / n for x, n in zip(sums, steps, strict=True)) / 4
    assert means["nll_by_piece"] == pytest.approx(by_piece, rel=1e-5)
    of_parts = [objective(model, tuple(x[p] for x in batch))[1]["nll"] * len(p) / 4 for p in ([0], [1, 2, 3])]
    assert sum(of_parts) == pytest.approx(means["nll"], rel=1e-5)
    batch[0][1, 4:] = 1  # padding of another kind
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    others = torch.autograd.grad(objective(model, batch)[0], list(model.parameters()))
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_structural_damping_leaves_padding_out():
    config = polyphonic_music.PolyphonicConfig(model="plain", cell="rnn", hidden=3)
    model = NextStep(config, 88, polyphonic_music.TABLE)
    pieces = some_pieces(5, 3)
    logits, _, (hidden, weight) = polyphonic_music.NextNotes().outputs(
        model, polyphonic_music.as_batch(pieces), with_hidden=True
    )
    assert logits.shape == (2, 4, 88)
    torch.testing.assert_close(weight[0], 1 / (1 - hidden[0].square()))
    assert weight[1, 2:].eq(0).all()
    assert weight[1, :2].ge(1).all()


def test_yardsticks_count():
    train, test = some_pieces(30, 20), some_pieces(10, 8)
    found = polyphonic_music.yardsticks(polyphonic_music.as_batch(train), polyphonic_music.as_batch(test))
    pairs = [(piece[t], piece[t + 1]) for piece in train for t in range(len(piece) - 1)]
    totals = {"frequency": 0.0, "markov": 0.0}
    for piece in test:
        for t in range(len(piece) - 1):
            for note in range(88):
                known = [after[note].item() for _, after in pairs]
                same = [after[note].item() for before, after in pairs if before[note] == piece[t, note]]
                for name, seen in (("frequency", known), ("markov", same)):
                    p = (sum(seen) + 0.5) / (len(seen) + 1)
                    totals[name] -= float(np.log(p if piece[t + 1, note] else 1 - p))
    for name, total in totals.items():
        assert found[f"{name}_nll"] == pytest.approx(total / 16, rel=1e-5)


def test_published_figures_are_of_sets_and_cells_that_there_are():
    for name, figures in polyphonic_music.PUBLISHED.items():
        assert name in polyphonic.FILES
        for cell_name in figures:
            polyphonic_music.PolyphonicConfig(cell=cell_name, model="plain").check()


def test_every_optimizer_has_a_title():
    assert tuple(TITLES) == OPTIMIZERS


# Runs

QUICK = "--device cpu --data generated --hidden 5 --length 20".split()


@pytest.fixture
def few(monkeypatch):
    """A few made-up pieces."""
    whole = polyphonic.chords
    monkeypatch.setattr(polyphonic, "chords", lambda: whole((5, 3, 2)))


@pytest.mark.parametrize(
    "options",
    [["--model", "momentum"], ["--model", "momentum", "--cell", "gru", "--optimizer", "hf", "--max-cg", "4"]],
    ids=["adam", "hf"],
)
def test_a_run_resumes_to_the_same_numbers_and_writes_its_files(options, few, tmp_path, capsys, monkeypatch):
    options = [*QUICK, *options]
    polyphonic_music.main([*options, "--epochs", "2", "--out", str(tmp_path / "whole")])
    output = capsys.readouterr().out
    assert "data: generated, 5/3/2 pieces" in output
    assert "test nll" in output
    monkeypatch.setattr(polyphonic_music, "draw_prediction", lambda *args: None)
    for epochs in ("1", "2"):
        polyphonic_music.main([*options, "--epochs", epochs, "--out", str(tmp_path / "parts")])
    rows = read_metrics(tmp_path / "whole")
    assert read_metrics(tmp_path / "parts") == rows
    names = {"config.json", "metrics.csv", "summary.json", "checkpoint.pt", "prediction.png"}
    assert names_in(tmp_path / "whole") == names
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    for name in ("test_nll", "test_nll_by_piece", "best_epoch", "best_validation_nll", "frequency_nll", "markov_nll"):
        assert summaries[0][name] == summaries[1][name]
    best = min(float(row["validation_nll"]) for row in rows)
    assert summaries[0]["best_validation_nll"] == pytest.approx(best)


def test_notes_are_learned(tmp_path, monkeypatch):
    """Below the frequencies of the notes."""
    monkeypatch.setattr(polyphonic_music, "draw_prediction", lambda *args: None)
    options = "--device cpu --data generated --cell gru --model plain --hidden 30 --lr 2e-2 --epochs 8 --batch-size 8"
    polyphonic_music.main([*options.split(), "--out", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_nll"] < 0.8 * summary["frequency_nll"]


def test_a_run_is_not_resumed_with_other_data(few, tmp_path, monkeypatch):
    monkeypatch.setattr(polyphonic_music, "draw_prediction", lambda *args: None)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    options = [*QUICK, "--data", "auto", "--model", "plain", "--epochs", "1", "--out", str(tmp_path / "run")]
    polyphonic_music.main(options)
    write(tmp_path / "polyphonic" / "JSB_Chorales.mat", PARTS)
    with pytest.raises(SystemExit, match=r"data: 'generated' there, 'jsb' wanted"):
        polyphonic_music.main(options)
    with pytest.raises(SystemExit, match=r"Nottingham\.mat is not in HBNODE_DATA"):
        polyphonic_music.main([*QUICK, "--data", "nottingham", "--out", str(tmp_path / "other")])
