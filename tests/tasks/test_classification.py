"""Classification of irregular series: data and models."""

import itertools

import numpy as np
import pytest
import torch

from tasks import classification
from tasks.common.run import count_parameters
from tasks.data import labelled_series
from tasks.models.classifiers import NETWORKS, SHALLOW, fit_shallow, last_values, make_classifier, summaries


@pytest.mark.parametrize("thin", ["share", "most"])
def test_a_part_of_the_times_keeps_their_order_and_values(thin):
    series, _, _ = labelled_series.clinic(50)
    if thin == "share":
        few = labelled_series.with_share(series, 0.5, seed=0)
        assert few.lengths.tolist() == [min(n, max(2, round(n / 2))) for n in series.lengths.tolist()]
    else:
        few = labelled_series.thinned(series, 0.5, 6, seed=0)
        assert (few.lengths.min() >= 1, few.lengths.max()) == (True, 6)
    for b, length in enumerate(few.lengths.tolist()):
        places = [series.t[b].tolist().index(t) for t in few.t[b, :length].tolist()]
        assert places == sorted(set(places))
        kept, seen = few.x[b, :length], few.mask[b, :length]
        assert kept[seen].equal(series.x[b, places][seen])
        assert kept[~seen].isnan().all()
        assert not few.mask[b, length:].any()


@pytest.fixture(scope="module")
def batch():
    series, labels, _ = labelled_series.clinic(12)
    return classification.as_samples(series, labels, series.x.shape[1])


@pytest.mark.sparse
@pytest.mark.parametrize("pool", ["last", "last and mean"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_equal_parameters_that_padding_does_not_change(name, pool, batch):
    if name == "cfc":
        pytest.importorskip("ncps")
    x, t, mask, lengths, static, _ = batch
    torch.manual_seed(0)
    model = make_classifier(name, batch[:-1], 3, 10.0, 3000, {"rtol": 1e-6, "atol": 1e-6}, pool, 0.1).eval()
    assert abs(count_parameters(model) - 3000) < 400
    logits = model(x, t, mask, lengths, static)
    one, end = slice(3, 4), int(lengths[3])
    alone = model(x[one, :end], t[one, :end], mask[one, :end], lengths[one], static[one])
    torch.testing.assert_close(alone, logits[one], rtol=1e-3, atol=1e-4)
    moved = model(x, t + 100, mask, lengths, static)  # only gaps count
    torch.testing.assert_close(moved, logits, rtol=1e-3, atol=1e-4)


def test_summaries_against_numpy(batch):
    x, t, mask, lengths, static, _ = batch
    found = summaries(x, t, mask, lengths, static)
    last = last_values(x, t, mask, lengths, static)
    count = x.shape[2]
    for b, k in itertools.product(range(12), range(count)):
        values, times = (part[b][mask[b, :, k]].double().numpy() for part in (x[..., k], t))
        row = found[b, k : 8 * count : count]
        assert row[0] == len(values)
        if len(values) < 2:
            continue
        expected = [values[0], values[-1], values.mean(), values.min(), values.max(), values.std()]
        np.testing.assert_allclose(row[1:7], expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(row[7], np.polyfit(times, values, 1)[0], rtol=1e-5, atol=1e-8)
        assert last[b, k] == np.float32(values[-1])
    np.testing.assert_allclose(found[:, 8 * count :], static.numpy())


@pytest.mark.slow
def test_models_that_are_no_networks_return_probabilities():
    pytest.importorskip("aeon")
    series, labels, _ = labelled_series.clinic(150)
    train, validation, test = (
        classification.as_samples(series.select(index), labels[index], series.x.shape[1])
        for index in classification.split(labels, 0).values()
    )
    for name in SHALLOW:
        predicted = fit_shallow(name, train, validation, 0)(test)
        assert predicted.shape == (len(test[-1]), 2)
        np.testing.assert_allclose(predicted.sum(1), 1)
