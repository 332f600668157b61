"""Image generation: sequences of pixels, the loss, drawing, the pictures, training and resuming; images a second."""

import dataclasses
import json
import math
import os
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from tasks import image_generation
from tasks.common.config import parse
from tasks.image_generation import PRESETS, ImageGenerationConfig
from tasks.models import logistic_mixture
from tasks.models.contenders import TITLES
from tasks.models.transformers import CONTENDERS
from tasks.studies import image_throughput
from tests.tasks.small_runs import names_in, read_metrics

SMALL = {"d_model": 8, "heads": 2, "layers": 1, "feedforward": 8}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
QUICK = [*FLAGS, *"--device cpu --side 4 --train-size 24 --test-size 10 --batch-size 8 --drawn 3".split()]


def drawn_by(model, count, config, seed):
    """Images of a model, as levels."""
    pixels, generator = math.prod(config.shape), torch.Generator().manual_seed(seed)
    return image_generation.draw_pixels(model, count, pixels, config.levels, generator)


def tiny(**options):
    """A configuration of a small model and little images."""
    return ImageGenerationConfig(**{"side": 4, "logistics": 2, **SMALL} | options)


# Data


@pytest.mark.parametrize(("dataset", "side"), [("digits", None), ("digits", 4), ("mnist", 14), ("cifar10", 16)])
def test_sequences_are_the_levels_of_the_smaller_image(dataset, side):
    config = ImageGenerationConfig(dataset=dataset, side=side)
    channels, edge, _ = image_generation.SHAPE[dataset]
    images = torch.rand(2, channels, edge, edge, dtype=torch.float64)
    found = image_generation.sequences(images, config)
    rows, columns, _ = config.shape
    assert found.dtype == torch.uint8
    assert found.shape == (2, rows * columns * channels)
    block = edge // rows
    for place in range(found.shape[1]):
        pixel, channel = divmod(place, channels)
        row, column = divmod(pixel, columns)
        part = images[:, channel, row * block : (row + 1) * block, column * block : (column + 1) * block]
        expected = part.mean((1, 2)) * (config.levels - 1)
        assert ((found[:, place] - expected).abs() <= 0.5 + 1e-9).all()


def test_digits_have_17_levels_and_come_back_whole():
    config = ImageGenerationConfig()
    (x,), (test,) = image_generation.load_data(config)
    assert x.shape == (1437, 64)
    assert test.shape == (360, 64)
    assert sorted(x.unique().tolist()) == list(range(17))
    images, _ = image_generation.READ["digits"]("train")
    assert torch.equal(x.reshape(-1, 8, 8).float() / 16, images[:, 0])


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_real_images(dataset):
    root = os.environ.get("HBNODE_DATA")
    if not root or not any((Path(root) / name).exists() for name in ("MNIST", "cifar10-subset", "cifar-10-batches-py")):
        pytest.skip("no images in HBNODE_DATA")
    config = ImageGenerationConfig(dataset=dataset, train_size=20, test_size=10)
    (x,), (test,) = image_generation.load_data(config)
    assert x.shape == (20, math.prod(config.shape))
    assert len(test) == 10
    assert x.max() > 200


def test_without_the_images_it_says_what_to_do(monkeypatch):
    def absent(split):
        raise FileNotFoundError("it is not there. Fix: get it.")

    monkeypatch.setitem(image_generation.READ, "mnist", absent)
    with pytest.raises(SystemExit, match=r"it is not there\. Fix: get it"):
        image_generation.load_data(ImageGenerationConfig(dataset="mnist"))


def test_presets():
    mnist, cifar = (ImageGenerationConfig(**PRESETS[name]) for name in ("mnist", "cifar10"))
    for config, numbers in ((mnist, (8, 1e-4, 10, 0.6, 0.9, 784)), (cifar, (16, 2e-4, 4, 0.1, 0.9, 3072))):
        found = (config.layers, config.lr, config.batch_size, config.momentum, config.step_size)
        assert (*found, math.prod(config.shape)) == numbers
        assert (config.d_model, config.heads, config.feedforward, config.logistics) == (256, 8, 1024, 10)
        assert config.weight_decay == 0.01
    assert mnist.epochs == 250
    for name in PRESETS:
        parse(ImageGenerationConfig, PRESETS, "", ["--preset", name])


# Loss and drawing


def test_the_loss_is_the_mixture_of_each_pixel_given_those_before():
    torch.manual_seed(0)
    config = tiny()
    model = config.make_model().double()
    x = torch.randint(17, (3, 16))
    loss, means = image_generation.bits_per_dimension(model, (x.byte(),), 17)
    total = 0.0
    for t in range(16):
        read = torch.cat([torch.full((3, 1), 17), x[:, :t]], dim=1)
        total -= logistic_mixture.log_probability(model(read)[:, -1], x[:, t], 17).mean().item() / 16
    assert loss.item() == pytest.approx(total, rel=1e-9)
    assert means["bits_per_dim"] == pytest.approx(total / math.log(2), rel=1e-9)


@pytest.mark.parametrize("model", CONTENDERS)
def test_drawing_is_reading_its_own_pixels(model):
    """Step by step: each pixel is drawn from the output for those before it, which whole sequences give too."""
    torch.manual_seed(0)
    config = tiny(model=model)
    net = config.make_model().double().train()
    before = torch.random.get_rng_state()
    drawn = drawn_by(net, 3, config, seed=5)
    assert net.training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn.dtype == torch.long
    assert drawn.shape == (3, 16)
    assert torch.equal(drawn, drawn_by(net, 3, config, seed=5))
    assert not torch.equal(drawn, drawn_by(net, 3, config, seed=6))
    with torch.no_grad():
        outputs = net.eval()(image_generation.with_start(drawn, 17))
    generator = torch.Generator().manual_seed(5)
    for t in range(16):
        assert torch.equal(logistic_mixture.sample(outputs[:, t], 17, generator), drawn[:, t])


def test_drawn_pixels_have_the_probabilities_of_the_model():
    torch.manual_seed(0)
    config = tiny(side=1, dataset="digits")
    net = config.make_model()
    torch.nn.init.normal_(net.readout.bias)
    count = 40_000
    found = drawn_by(net, count, config, seed=0)[:, 0].bincount(minlength=17) / count
    with torch.no_grad():
        output = net(torch.full((1, 1), 17))[0]
        expected = logistic_mixture.log_probability(output.expand(17, -1), torch.arange(17), 17).exp()
    error = (expected * (1 - expected) / count).sqrt() + 1e-9
    assert ((found - expected).abs() / error).max() < 4


@pytest.mark.parametrize("model", ["softmax", "momentum", "heavy_ball"])
def test_contenders_learn(model):
    """Images of one level each: after the first pixel all are known."""
    torch.manual_seed(0)
    config = tiny(model=model, d_model=16, feedforward=32, logistics=3)
    net = config.make_model()
    optimizer = image_generation.radam(net, 1e-2, 0.0)
    for _ in range(120):
        x = torch.randint(3, (16, 1)).mul(8).expand(-1, 16)
        loss, means = image_generation.bits_per_dimension(net, (x,), 17)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert means["bits_per_dim"] < 1.0  # log2(3) / 16 = 0.1 is the least, log2(3) = 1.58 without reading


# Runs


def test_a_run_resumes_to_the_same_numbers_and_pictures(tmp_path, capsys):
    options = [*QUICK, "--model", "momentum", "--lr", "0.01", "--draw-every", "2"]
    image_generation.main([*options, "--epochs", "3", "--out", str(tmp_path / "whole")])
    assert "24/10 images of 4 x 4 pixels, 17 levels" in capsys.readouterr().out
    image_generation.main([*options, "--epochs", "2", "--out", str(tmp_path / "parts")])
    image_generation.main([*options, "--epochs", "3", "--out", str(tmp_path / "parts")])
    rows = read_metrics(tmp_path / "whole")
    assert rows == read_metrics(tmp_path / "parts")
    assert {"train_bits_per_dim", "test_bits_per_dim", "test_loss"} <= rows[0].keys()
    names = {"config.json", "metrics.csv", "summary.json", "checkpoint.pt", "samples.pt", "samples.png"}
    assert names_in(tmp_path / "whole") == names
    whole, parts = (torch.load(tmp_path / name / "samples.pt", weights_only=True) for name in ("whole", "parts"))
    assert list(whole) == list(parts) == [2, 3]
    for epoch, images in whole.items():
        assert images.shape == (3, 16)
        assert torch.equal(images, parts[epoch])
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["pixels"], summary["levels"], summary["training_images"], summary["test_images"]) == (
        16,
        17,
        24,
        10,
    )
    assert summary["test_bits_per_dim"] == float(rows[-1]["test_bits_per_dim"])


def test_a_run_that_was_killed_after_its_first_drawing_goes_on(tmp_path, monkeypatch):
    options = [*QUICK, "--model", "linear", "--epochs", "2", "--draw-every", "1"]
    image_generation.main([*options, "--out", str(tmp_path / "whole")])

    def killed(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(image_generation, "evaluate", killed)
        with pytest.raises(RuntimeError, match="killed"):
            image_generation.main([*options, "--out", str(tmp_path / "parts")])
    assert "samples.pt" in names_in(tmp_path / "parts")
    image_generation.main([*options, "--out", str(tmp_path / "parts")])
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")


def test_the_trained_weights_give_the_bits_and_the_last_drawing(tmp_path):
    folder = tmp_path / "run"
    image_generation.main([*QUICK, "--model", "linear", "--epochs", "2", "--out", str(folder)])
    described = json.loads((folder / "config.json").read_text())
    config = ImageGenerationConfig(**{f.name: described[f.name] for f in dataclasses.fields(ImageGenerationConfig)})
    model = config.make_model()
    model.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["model"])
    _, test = image_generation.load_data(config)
    with torch.no_grad():
        _, means = image_generation.bits_per_dimension(model.eval(), test, 17)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_bits_per_dim"] == pytest.approx(means["bits_per_dim"], rel=1e-5)
    drawn = torch.load(folder / "samples.pt", weights_only=True)
    assert torch.equal(drawn[2].long(), drawn_by(model, 3, config, seed=0))


def test_no_drawings(tmp_path):
    image_generation.main([*QUICK, "--drawn", "0", "--epochs", "1", "--out", str(tmp_path)])
    assert not {"samples.pt", "samples.png"} & names_in(tmp_path)


def test_a_damaged_file_of_samples_is_named(tmp_path):
    options = [*QUICK, "--model", "linear", "--out", str(tmp_path)]
    image_generation.main([*options, "--epochs", "1"])
    (tmp_path / "samples.pt").write_bytes(b"no archive")
    with pytest.raises(SystemExit, match=r"samples\.pt cannot be read (?s:.*) Fix: delete its folder"):
        image_generation.main([*options, "--epochs", "2"])


@pytest.mark.parametrize(("channels", "epochs"), [(1, range(1, 2)), (3, range(1, 21))])
def test_the_picture(channels, epochs, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(image_generation, "write_figure", lambda figure, path: figures.append(figure))
    config = tiny() if channels == 1 else tiny(dataset="cifar10")
    pixels, levels = math.prod(config.shape), config.levels
    images = {epoch: torch.full((5, pixels), epoch, dtype=torch.uint8) for epoch in epochs}
    test = torch.zeros(4, pixels, dtype=torch.uint8)
    image_generation.write_picture(images, test, config, "title", tmp_path / "samples.png")
    (figure,) = figures
    figure.draw_without_rendering()
    rows = [ax for ax in figure.axes if ax.get_ylabel()]
    labels = [ax.get_ylabel() for ax in rows]
    assert labels[0] == f"epoch {epochs[0]}"
    assert labels[-2:] == [f"epoch {epochs[-1]}", "test images"]
    assert len(rows) == min(len(epochs), image_generation.SHOWN_EPOCHS) + 1
    for ax, label in zip(rows[:-1], labels, strict=False):
        assert ax.images[0].get_array().flatten()[0] == pytest.approx(int(label.split()[1]) / (levels - 1))
    image_generation.write_picture({}, test, config, "title", tmp_path / "samples.png")
    import matplotlib.pyplot as plt

    plt.close("all")


def test_every_contender_has_a_title():
    assert CONTENDERS.keys() <= TITLES.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--side", "5"], "--side must divide 8, the edge of digits, got 5"),
        (["--dataset", "mnist", "--side", "8"], "--side must divide 28, the edge of mnist, got 8"),
        (["--draw-every", "0"], "--draw-every must be positive, got 0"),
        (["--logistics", "0"], "--logistics must be positive"),
        (["--momentum", "1"], "--momentum must be below 1, got 1.0"),
        (["--d-model", "10", "--heads", "4"], "--d-model must be a multiple of --heads, got 10 and 4"),
        (["--model", "momentom"], "invalid choice: 'momentom'"),
    ],
)
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit):
        image_generation.main(options)
    assert message in capsys.readouterr().err


# Images a second


def test_throughput_writes_a_table_with_ratios_to_softmax(tmp_path, capsys, monkeypatch):
    measured = iter([9.0, 9.0, 4.0, 1.0, 4.0, 2.0, 4.0, 0.5] * 2)  # softmax and momentum in rounds; the first is void
    drawn = []

    def seconds(model, config, batch_size, length):
        drawn.append(length)
        return next(measured)

    monkeypatch.setattr(image_throughput, "seconds", seconds)
    monkeypatch.setattr(image_throughput.random.Random, "sample", lambda self, names, count: names)
    argv = [*"--model softmax,momentum --length 6 12 --batch-size 2 --repeats 3 --device cpu".split(), *FLAGS]
    image_throughput.main([*argv, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "throughput.json").read_text())
    rows = {(row["model"], row["length"]): row for row in report["rows"]}
    assert set(rows) == {(name, length) for name in ("softmax", "momentum") for length in (6, 12)}
    for (name, _), row in rows.items():
        expected = (0.5, 1.0) if name == "softmax" else (2.0, 4.0)
        assert (row["images_per_second"], row["over_softmax"]) == expected
    assert rows["momentum", 6]["state_bytes"] == rows["momentum", 12]["state_bytes"]
    assert rows["softmax", 6]["state_bytes"] == 2 * 6 * 8 * 4  # keys and values of a layer
    assert rows["softmax", 12]["state_bytes"] == 2 * 12 * 8 * 4
    assert drawn == [6] * 8 + [12] * 8
    assert report["threads"] == torch.get_num_threads()
    assert "× softmax" in capsys.readouterr().out


def test_the_time_is_that_of_a_batch():
    config = tiny()
    assert 0 < image_throughput.seconds(config.make_model(), config, batch_size=2, length=5) < 60


@pytest.mark.parametrize("options", [["--model", "linear"], ["--length", "0"], ["--layers", "0"], ["--device", "gpu"]])
def test_throughput_refuses_bad_options(options):
    with pytest.raises(SystemExit):
        image_throughput.main(options)


def test_the_bytes_of_a_state():
    state = types.SimpleNamespace
    nested = (torch.zeros(2, 3), [torch.zeros(4, dtype=torch.float64)], {"x": (torch.zeros(5),)})
    assert image_throughput.state_bytes(nested) == 24 + 32 + 20
    assert image_throughput.state_bytes((state(), None)) == 0
