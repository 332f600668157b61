"""Tasks of recurrent layers: rules and their tables, models, losses against loops, the papers' sizes."""

import dataclasses
import importlib
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("sklearn")

import hbnode
from tasks import adding, copying, language_model, pixel_mnist, polyphonic_music, speech
from tasks.common.config import parse
from tasks.common.run import count_parameters
from tasks.data import speech as speech_data
from tasks.data.text import read_text
from tasks.models import awd_lstm
from tasks.models.next_step import NextStep, as_batch
from tasks.models.recurrent import CELLS, LAYERS, RULES, RecurrentConfig, RuleOptions, make_layer
from tasks.pixel_mnist import PixelMnistConfig
from tests.models import slow
from tests.tasks.small_runs import read_metrics

TABLE = {
    "momentum": RuleOptions(momentum=0.6, step_size=0.9),
    "adam": RuleOptions(momentum=0.5, step_size=2.0, beta=0.99),
    "sr": RuleOptions(step_size=0.7, restart=6),
}


# Rules and layers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "plain"}, RuleOptions()),
        ({"model": "adam", "beta": 0.1}, RuleOptions(0.5, 2.0, 0.1)),
        ({"model": "sr", "restart": 2}, RuleOptions(step_size=0.7, restart=2)),
        ({"model": "gain"}, RuleOptions(step_size=0.9)),
        ({"model": "adaptive", "momentum": 0.3}, RuleOptions(step_size=0.9)),  # not in the table
        ({"model": "momentum", "momentum": 0.0}, RuleOptions(0.0, 0.9)),
    ],
)
def test_rules_come_from_the_table_and_the_options(options, expected):
    assert RecurrentConfig(**options).rule_options(TABLE) == expected


def test_a_forget_bias_is_half_of_both_and_steady_in_the_filter():
    """b_ih inside the filter grows to b s / (1 - mu), b_hh stays b."""
    rule = RecurrentConfig(model="forget").rule_options(TABLE)
    layer = make_layer("forget", "lstm", 2, 3, rule, forget_bias=-4.0)
    expected = torch.zeros(12)
    expected[3:6] = -4.0 * 0.9 / (1 - 0.6) - 4.0
    torch.testing.assert_close(layer.bias_ih_l0 + layer.bias_hh_l0, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_every_variant_of_every_cell_runs(cell):
    config = RecurrentConfig(model="all", cell=cell)
    assert ("forget" in config.chosen()) == (cell == "lstm")
    assert (
        "oscillators"
        in parse(adding.AddingConfig, {}, "", ["--device", "cpu", "--model", "all", "--cell", cell]).chosen()
    ) == (cell == "lstm")
    for model in config.chosen():
        rule = dataclasses.replace(config, model=model).rule_options(TABLE)
        layer = make_layer(model, cell, 2, 3, rule, batch_first=True, num_layers=2)
        assert layer(torch.randn(4, 5, 2))[0].shape == (4, 5, 3)
        assert isinstance(layer, LAYERS[cell])
        assert type(layer.rule) is (RULES[model][0] if model in RULES else hbnode.nn.rules.Momentum)


@pytest.mark.parametrize(("cell", "reference"), [("lstm", nn.LSTM), ("rnn", nn.RNN), ("gru", nn.GRU)])
def test_controls_are_torchs_layer_with_scaled_input(cell, reference):
    x = torch.randn(4, 6, 2, dtype=torch.float64)
    for model, scale in (("plain", 1.0), ("gain", 0.9)):
        rule = RecurrentConfig(model=model).rule_options(TABLE)
        layer = make_layer(model, cell, 2, 3, rule, batch_first=True).double()
        scaled = reference(2, 3, batch_first=True).double()
        state = layer.state_dict()
        scaled.load_state_dict({k: v * scale if k.endswith("ih_l0") else v for k, v in state.items()})
        torch.testing.assert_close(layer(x)[0], scaled(x)[0], rtol=1e-12, atol=1e-12)


# The papers' sizes and tables


# Pixel MNIST


SIZES = {  # of the paper; one LSTM with two biases and a readout
    "copying 2k": (copying.CopyingConfig, copying.Copier, 155_239),
    "adding 750": (adding.AddingConfig, adding.Adder, 67_713),
    "pixel_mnist mnist-128": (PixelMnistConfig, PixelMnistConfig.make_model, 68_362),
    "pixel_mnist pmnist-256": (PixelMnistConfig, PixelMnistConfig.make_model, 267_786),
    "pixel_mnist pmnist-dtriv-170": (PixelMnistConfig, PixelMnistConfig.make_model, 16_415),
    "speech timit-158": (speech.SpeechConfig, speech.make_model, 203_159),
    "speech timit-dtriv-224": (speech.SpeechConfig, speech.make_model, 108_321),  # with the whole orthogonal weight
    "language_model ptb": (
        language_model.LanguageModelConfig,
        lambda config: language_model.make_model(10_000, config),
        24_221_600,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_papers_sizes_and_rules(name):
    kind, make, expected = SIZES[name]
    module = importlib.import_module(f"tasks.{name.split()[0]}")
    argv = ["--preset", name.split()[1], "--model", "momentum", "--device", "cpu"]
    config = parse(kind, module.PRESETS, "", argv)
    config = config.filled() if kind is speech.SpeechConfig else config
    with torch.device("meta" if expected > 10**6 else "cpu"):
        model = make(config)
    is_pixels = module is pixel_mnist
    assert (pixel_mnist.degrees_of_freedom(model, config) if is_pixels else count_parameters(model)) == expected
    if name == "copying 2k":
        assert config.rule_options(config.table()) == RuleOptions(momentum=0.9, step_size=2.0)
        assert dataclasses.replace(config, length=1000).table()["momentum"] == RuleOptions(momentum=0.6, step_size=0.9)
    if name == "language_model ptb":
        assert language_model.table_of(config)["momentum"] == RuleOptions(momentum=0.0, step_size=0.6)


def small_pixels(**options):
    return PixelMnistConfig(**{"dataset": "digits", "side": 4, "hidden": 5} | options)


def test_the_permutation_is_that_of_other_papers():
    order = pixel_mnist.permutation(784)
    assert order[:8].tolist() == [319, 576, 323, 107, 355, 716, 197, 20]
    assert order.sort().values.tolist() == list(range(784))


@pytest.mark.parametrize(("side", "permuted"), [(28, True), (14, False), (4, True)])
def test_sequences_are_the_pixels_of_the_smaller_image(side, permuted):
    images = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    found = pixel_mnist.sequences(images, PixelMnistConfig(side=side, permuted=permuted))
    block = 28 // side
    order = pixel_mnist.permutation(side**2) if permuted else range(side**2)
    assert found.shape == (3, side**2, 1)
    for t, pixel in enumerate(order):
        row, column = divmod(int(pixel), side)
        part = images[:, 0, row * block : (row + 1) * block, column * block : (column + 1) * block]
        torch.testing.assert_close(found[:, t, 0], part.mean((1, 2)))


def test_the_last_sixth_is_held_out_and_no_image_is_in_two_parts(monkeypatch):
    def numbered(split):
        numbers = torch.arange(60) if split == "train" else torch.arange(60, 80)
        return (numbers / 100.0).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28), numbers

    monkeypatch.setitem(pixel_mnist.READ, "mnist", numbered)
    for train_size, test_size in ((0, 0), (7, 3), (10**6, 10**6)):
        config = PixelMnistConfig(side=14, permuted=True, train_size=train_size, test_size=test_size)
        parts = pixel_mnist.load_data(config)
        cut = {"train": train_size, "validation": test_size, "test": test_size}
        for (name, (x, y)), numbers in zip(parts.items(), (range(50), range(50, 60), range(60, 80)), strict=True):
            assert y.tolist() == list(numbers)[: cut[name] or None]
            torch.testing.assert_close(x, (y / 100.0).reshape(-1, 1, 1).expand(-1, 196, 1))


def test_cross_entropy_and_accuracy():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    loss, means = pixel_mnist.cross_entropy(lambda x: logits, (None, torch.tensor([0, 1, 1])))
    each = [math.log(math.exp(2) + 2) - 2, math.log(math.e + 2) - 1, math.log(math.exp(3) + 2)]
    assert loss.item() == pytest.approx(sum(each) / 3)
    assert means["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("task", [pixel_mnist, speech])
def test_the_optimizer_has_a_rate_for_orthogonal_weights(task):
    options = {"model": "momentum", "cell": "dtriv", "hidden": 6, "lr": 3e-3, "orthogonal_lr": 1e-4}
    if task is pixel_mnist:
        config = small_pixels(**options)
        model = config.make_model()
        groups = pixel_mnist.make_optimizer(model, config).param_groups
        assert {group["alpha"] for group in groups} == {0.99}
        plain = small_pixels()
        assert pixel_mnist.make_optimizer(plain.make_model(), plain).param_groups[0]["alpha"] == 0.9
    else:
        config = speech.SpeechConfig(**options)
        model = speech.make_model(config)
        groups = speech.make_optimizer(config, model).param_groups
        assert [group["betas"] for group in groups] == [(0.9, 0.999), (0.0, 0.99)]  # RMSprop but for the bias
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if rates[id(p)] == 1e-4} == {
        name for name, _ in model.named_parameters() if "weight_hh" in name
    }
    assert set(rates.values()) == {1e-4, 3e-3}


@pytest.mark.parametrize(("cell", "every", "expected"), [("dtriv", 3, [3, 6]), ("dtriv", 0, []), ("lstm", 3, [])])
def test_the_basis_is_moved_when_it_is_time(cell, every, expected, monkeypatch):
    config = small_pixels(cell=cell, rebase=every)
    model = config.make_model()
    moved = []
    monkeypatch.setattr(model.layer, "rebase", lambda: moved.append(step), raising=False)
    for step in range(1, 8):
        pixel_mnist.rebase(model, config, step)
    assert moved == expected


def test_the_weights_of_the_best_epoch_and_of_the_last_are_tested(tmp_path):
    options = "--device cpu --dataset digits --side 4 --train-size 24 --test-size 10 --batch-size 8 --hidden 6"
    pixel_mnist.main([*options.split(), *"--lr 0.1 --epochs 5 --model plain --out".split(), str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    config = small_pixels(model="plain", hidden=6, train_size=24, test_size=10)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for weights, prefix in ((checkpoint["best"]["model"], ""), (checkpoint["model"], "last_")):
        model = config.make_model()
        assert model.layer.bias_ih_l0[6:12].tolist() == [1.0] * 6  # of the forget gate
        model.load_state_dict(weights)
        loss, means = pixel_mnist.cross_entropy(model, pixel_mnist.load_data(config)["test"])
        assert summary[f"{prefix}test_loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert summary[f"{prefix}test_accuracy"] == pytest.approx(means["accuracy"])


# Adding and copying


# Speech and music: what is predicted is the next step


def spectra(count):
    return [speech_data.log_spectra(x) for x in speech_data.tones((count, 1, 1))["train"]]


def pieces(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, (length, 88), generator=generator).to(torch.uint8) for length in lengths]


def test_the_loss_of_speech_is_the_mean_over_frames_that_are_no_padding():
    x, lengths, share = as_batch(spectra(5))
    model = nn.Linear(129, 129)
    errors = []
    for rows, length in zip(x, lengths.tolist(), strict=True):
        assert not rows[length + 1 :].any()
        errors.append((model(rows[:length]) - rows[1 : length + 1]).square().flatten())
    expected = torch.cat(errors).mean()
    loss, means = speech.frame_loss(model, (x, lengths, share))
    torch.testing.assert_close(loss, expected)
    assert means["mse"] == pytest.approx(expected.item(), rel=1e-5)
    parts = [[0, 3], [1, 2, 4]]  # in batches of unequal size
    of_parts = [speech.frame_loss(model, (x[p], lengths[p], share[p]))[1]["mse"] * len(p) / 5 for p in parts]
    assert sum(of_parts) == pytest.approx(expected.item(), rel=1e-5)
    x[0, lengths[0] + 1 :] = torch.nan
    assert speech.frame_loss(model, (x, lengths, share))[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_music_is_the_mean_over_steps_and_over_pieces():
    rolls = pieces(9, 4, 2, 7)
    model, objective = nn.Linear(88, 88), polyphonic_music.NextNotes()
    sums = []
    for roll in rolls:
        before, after = roll[:-1].float(), roll[1:].float()
        sums.append(nn.functional.binary_cross_entropy(model(before).sigmoid(), after, reduction="sum").item())
    steps, batch = [8, 3, 1, 6], as_batch(rolls)
    loss, means = objective(model, batch)
    assert loss.item() == pytest.approx(sum(sums) / 4, rel=1e-5)
    assert means["nll"] == pytest.approx(sum(sums) / sum(steps), rel=1e-5)
    assert means["nll_by_piece"] == pytest.approx(sum(x / n for x, n in zip(sums, steps, strict=True)) / 4, rel=1e-5)
    of_parts = [objective(model, tuple(x[p] for x in batch))[1]["nll"] * len(p) / 4 for p in ([0], [1, 2, 3])]
    assert sum(of_parts) == pytest.approx(means["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "series", "features", "padding"),
    [(speech.FrameError(), spectra(4), 129, 9.0), (polyphonic_music.NextNotes(), pieces(9, 4, 2, 7), 88, 1)],
    ids=["speech", "music"],
)
def test_padding_and_its_hidden_states_count_nowhere(objective, series, features, padding):
    """What a Hessian-free optimizer minimises: of speech half the squared error of a recording."""
    config = speech.SpeechConfig(model="plain", cell="rnn", hidden=6)
    model, batch = NextStep(config, features, speech.TABLE), as_batch(series)
    predicted, targets = objective.outputs(model, batch)
    same, _, (hidden, weight) = objective.outputs(model, batch, with_hidden=True)
    assert torch.equal(same, predicted)
    beyond = torch.arange(hidden.shape[1]) >= batch[1][:, None]
    assert weight[beyond].eq(0).all()
    assert weight[~beyond].ge(1).all()
    value, (loss, _) = objective.value(predicted, targets), objective(model, batch)
    factor = batch[1].sum() * features / 2 / len(series) if features == 129 else 1.0
    torch.testing.assert_close(value, loss * factor)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    for row, length in zip(batch[0], batch[1].tolist(), strict=True):
        row[length + 1 :] = padding
    others = torch.autograd.grad(objective.value(*objective.outputs(model, batch)), list(model.parameters()))
    torch.testing.assert_close(gradients, others, rtol=1e-4, atol=1e-5)


def test_yardsticks_of_speech():
    waves = speech_data.tones((4, 1, 3))
    known, test = ([speech_data.log_spectra(x) for x in waves[part]] for part in ("train", "test"))
    found = speech.yardsticks(as_batch(known), as_batch(test))
    repeated = torch.cat([(x[1:] - x[:-1]).square().flatten() for x in test]).mean().item()
    mean = torch.cat([x[1:] for x in known]).mean(0)
    constant = torch.cat([(x[1:] - mean).square().flatten() for x in test]).mean().item()
    assert found == pytest.approx({"repeat_mse": repeated, "mean_mse": constant}, rel=1e-5)


def test_yardsticks_of_music():
    train, test = pieces(30, 20), pieces(10, 8)
    found = polyphonic_music.yardsticks(as_batch(train), as_batch(test))
    pairs = [(piece[t], piece[t + 1]) for piece in train for t in range(len(piece) - 1)]
    totals = {"frequency": 0.0, "markov": 0.0}
    for piece in test:
        for t in range(len(piece) - 1):
            for note in range(88):
                known = [after[note].item() for _, after in pairs]
                same = [after[note].item() for before, after in pairs if before[note] == piece[t, note]]
                for name, counted in (("frequency", known), ("markov", same)):
                    p = (sum(counted) + 0.5) / (len(counted) + 1)
                    totals[name] -= float(np.log(p if piece[t + 1, note] else 1 - p))
    assert found == pytest.approx({f"{name}_nll": total / 16 for name, total in totals.items()}, rel=1e-5)


def test_every_step_but_the_first_is_predicted_in_one_part():
    rolls = pieces(12, 11, 2, 6)
    for roll in rolls:  # whose first note counts its steps
        roll[:, 0] = torch.arange(len(roll))
    parts = polyphonic_music.parts_of(rolls, 5)
    assert [len(x) for x in parts] == [6, 6, 2, 6, 6, 2, 6]
    assert [x[1:, 0].tolist() for x in parts[:3]] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11]]
    assert all(torch.equal(*pair) for pair in zip(polyphonic_music.parts_of(rolls, 0), rolls, strict=True))


# Language model


def test_columns():
    assert language_model.in_columns(torch.arange(11), 3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    with pytest.raises(SystemExit, match="a text of 5 words has no two for each of 3 streams"):
        language_model.in_columns(torch.arange(5), 3)


def test_one_mask_drops_a_unit_at_all_times_and_another_a_word_everywhere():
    x = torch.ones(7, 3, 400)
    found = awd_lstm.locked_dropout(x, 0.25, training=True)
    assert torch.equal(found, found[:1].expand_as(found))
    assert sorted(found.unique().tolist()) == [0, pytest.approx(4 / 3)]
    assert (found == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert not torch.equal(found[0, 0], found[0, 1])
    embedding, words = nn.Embedding(200, 4), torch.arange(200).repeat(2, 1)
    found = awd_lstm.embed(embedding, words, 0.3, training=True)
    assert torch.equal(found[0], found[1])
    kept = found[0].abs().sum(1) > 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.1)
    torch.testing.assert_close(found[0][kept], embedding.weight[kept] / 0.7)
    torch.testing.assert_close(awd_lstm.embed(embedding, words, 0.3, training=False), embedding(words))


def test_dropped_weights():
    layer = awd_lstm.drop_recurrent_weights(nn.LSTM(3, 30), 0.4)
    original = layer.parametrizations.weight_hh_l0.original
    with parametrize.cached():
        one = layer.weight_hh_l0
        assert layer.weight_hh_l0 is one
    kept = one != 0
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.05)
    torch.testing.assert_close(one[kept], original[kept] / 0.6)
    assert torch.equal(layer.eval().weight_hh_l0, original)
    assert not parametrize.is_parametrized(awd_lstm.drop_recurrent_weights(nn.LSTM(3, 4), 0.0))


def test_penalties():
    dropped, raw = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    expected = 2 * (dropped**2).mean() + 0.5 * ((raw[1:] - raw[:-1]) ** 2).mean()
    torch.testing.assert_close(awd_lstm.penalty(dropped, raw, 2.0, 0.5), expected)
    torch.testing.assert_close(awd_lstm.penalty(dropped[:1], raw[:1], 2.0, 0.5), 2 * (dropped[:1] ** 2).mean())


def test_lengths_of_pieces():
    lengths = awd_lstm.chunk_lengths(100_000, 70, 0, 3)
    assert sum(lengths) == 100_000
    assert lengths != awd_lstm.chunk_lengths(100_000, 70, 0, 4)
    assert lengths == awd_lstm.chunk_lengths(100_000, 70, 0, 3)
    whole = torch.tensor(lengths[:-1]).float()
    half = whole < 52
    assert half.float().mean().item() == pytest.approx(0.05, abs=0.02)
    assert whole[~half].mean().item() == pytest.approx(69.5, abs=0.6)  # rounded down
    assert whole[~half].std().item() == pytest.approx(5, abs=0.5)
    assert min(awd_lstm.chunk_lengths(21, 1, 0, 0)[:-1]) >= 5


def test_averaging_begins_when_the_loss_ceases_to_fall():
    p = nn.Parameter(torch.zeros(2))
    averaging, never = awd_lstm.Averaging([p], patience=2), awd_lstm.Averaging([p], patience=0)
    for loss, is_on in ((5.0, False), (4.0, False), (4.5, False), (4.7, False), (4.8, True), (9.0, True)):
        averaging.note(loss)
        never.note(loss)
        assert (averaging.is_on, never.is_on) == (is_on, False)  # 4.8 is above 4, the best but of the last two
    values = torch.randn(7, 2)
    for value in values:
        p.data.copy_(value)
        averaging.step()
    other = nn.Parameter(torch.zeros(2))
    restored = awd_lstm.Averaging([other], patience=2)
    restored.load_state_dict(averaging.state_dict())
    for means, weight, before in ((averaging, p, values[-1]), (restored, other, torch.zeros(2))):
        with means.used():
            torch.testing.assert_close(weight.detach(), values.mean(0))
        torch.testing.assert_close(weight.detach(), before)


def small_language(**options):
    none = dict.fromkeys(("dropout", "dropout_between", "dropout_input", "dropout_words", "weight_drop"), 0.0)
    small = {"data": "generated", "embedding": 8, "hidden": 12, "bptt": 9, "device": "cpu"}
    return language_model.LanguageModelConfig(**none | small | options)


@pytest.mark.parametrize("options", [{"model": "momentum"}, {"model": "sr"}, {"model": "adam", "cell": "gru"}])
def test_the_loss_of_a_text_is_the_same_however_it_is_cut(options):
    model = language_model.make_model(7, small_language(**options))
    text = torch.randint(7, (40, 3))
    with torch.no_grad():
        scores, dropped, raw, _ = model.eval()(text[:-1], model.fresh())
    assert dropped is raw  # no dropout
    torch.testing.assert_close(scores, raw @ model.embedding.weight.T + model.bias)
    expected = nn.functional.cross_entropy(scores.flatten(0, 1), text[1:].flatten()).item()
    for bptt in (40, 7, 1):
        assert language_model.evaluate(model, text, bptt) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_dropout_is_for_training_only():
    dropouts = dict.fromkeys(("dropout", "dropout_between", "dropout_input", "dropout_words", "weight_drop"), 0.4)
    model, words = language_model.make_model(7, small_language(**dropouts)), torch.randint(7, (5, 2))
    for mode in (True, False):
        one, another = (model.train(mode)(words, model.fresh())[0] for _ in range(2))
        assert torch.equal(one, another) != mode


def test_training_goes_through_the_text_once_with_the_state_carried(tmp_path):
    """Next to untrained, an epoch's loss is that of evaluating the text."""
    options = {"lr": 1e-9, "train_size": 600, "test_size": 300, "epochs": 1, "batch_size": 4, "clip": 0.0}
    config = small_language(model="momentum", out=str(tmp_path), **options)
    language_model.train(config)
    row = read_metrics(tmp_path)[0]
    torch.manual_seed(config.seed)
    text = read_text("generated", vocabulary=5000, train_size=600, test_size=300)
    model = language_model.make_model(len(text.words), config)
    for name, columns in (("train", 4), ("validation", 10)):
        expected = language_model.evaluate(model, language_model.in_columns(text.parts[name], columns), 50)
        assert float(row[f"{name}_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(row["validation_perplexity"]) == pytest.approx(math.exp(float(row["validation_loss"])))


@pytest.mark.slow
def test_the_chain_is_learned_and_iterates_are_averaged(tmp_path):
    options = "--device cpu --data generated --train-size 12000 --embedding 32 --layers 1 --batch-size 10"
    language_model.main([*options.split(), "--model", "momentum", "--epochs", "6", "--out", str(tmp_path / "long")])
    summary = json.loads((tmp_path / "long" / "summary.json").read_text())
    assert 3.2 < summary["test_perplexity"] < 5 < summary["unigram_perplexity"]  # at best 3.35 on average
    options = "--device cpu --data generated --train-size 300 --test-size 100 --embedding 6 --hidden 8 --batch-size 5"
    options += " --bptt 12 --model sr --patience 1 --lr 90 --epochs 4"
    language_model.main([*options.split(), "--out", str(tmp_path / "averaged")])
    assert read_metrics(tmp_path / "averaged")[-1]["is_averaged"] == "1"


@pytest.mark.parametrize(
    ("task", "name"), [(polyphonic_music, "piano"), *slow((language_model, "ptb"), (speech, "timit"))], ids=str
)
def test_missing_data_is_named_and_a_run_is_of_one_source(task, name, tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    options = ["--device", "cpu", "--model", "plain", "--hidden", "5", "--epochs", "1", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=r"(ptb|TIMIT|Piano_midi.mat) is not in .*Fix: "):
        task.main([*options, "--data", name])
    task.main(options)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == "generated"  # and not auto
