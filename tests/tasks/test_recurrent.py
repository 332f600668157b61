"""Tasks of recurrent layers: rules and their tables, models, losses against loops, the papers' sizes."""

import pytest
import torch
from torch import nn

from tasks import language_model, pixel_mnist, polyphonic_music, speech
from tasks.common.config import parse
from tasks.common.run import count_parameters
from tasks.data import speech as speech_data
from tasks.models import awd_lstm
from tasks.models.next_step import as_batch
from tasks.models.recurrent import LayerWithReadout, RecurrentConfig, RuleOptions
from tasks.pixel_mnist import PixelMnistConfig

TABLE = {
    "momentum": RuleOptions(momentum=0.6, step_size=0.9),
    "adam": RuleOptions(momentum=0.5, step_size=2.0, beta=0.99),
    "sr": RuleOptions(step_size=0.7, restart=6),
}


# Rules and layers


def test_a_forget_bias_is_half_of_both_and_steady_in_the_filter():
    """b_ih inside the filter grows to b s / (1 - mu), b_hh stays b."""
    layer = RecurrentConfig(model="forget", hidden=3, forget_bias=-4.0).make_layer(2, TABLE)
    expected = torch.zeros(12)
    expected[3:6] = -4.0 * 0.9 / (1 - 0.6) - 4.0
    torch.testing.assert_close(layer.bias_ih_l0 + layer.bias_hh_l0, expected)


@pytest.mark.parametrize(("cell", "reference"), [("lstm", nn.LSTM), ("rnn", nn.RNN), ("gru", nn.GRU)])
def test_controls_are_torchs_layer_with_scaled_input(cell, reference):
    x, scaled = torch.randn(4, 6, 2), reference(2, 3, batch_first=True)
    for model, scale in (("plain", 1.0), ("gain", 0.9)):
        layer = RecurrentConfig(model=model, cell=cell, hidden=3).make_layer(2, TABLE, batch_first=True)
        state = layer.state_dict()
        scaled.load_state_dict({k: v * scale if k.endswith("ih_l0") else v for k, v in state.items()})
        torch.testing.assert_close(layer(x)[0], scaled(x)[0])


# The papers' sizes, and pixel MNIST


def test_presets_have_the_papers_sizes_and_rules():
    """One LSTM with two biases and a readout; a DTRIV with all of U; and AWD-LSTM."""
    for preset, expected in (("mnist-128", 68_362), ("pmnist-256", 267_786), ("pmnist-dtriv-170", 30_950)):
        argv = ["--preset", preset, "--model", "momentum", "--device", "cpu"]
        assert count_parameters(parse(PixelMnistConfig, pixel_mnist.PRESETS, "", argv).make_model()) == expected
    config = parse(language_model.LanguageModelConfig, language_model.PRESETS, "", ["--preset", "ptb"])
    with torch.device("meta"):
        assert count_parameters(language_model.make_model(10_000, config)) == 24_221_600
    assert language_model.table_of(config)["momentum"] == RuleOptions(momentum=0.0, step_size=0.6)


def test_the_last_sixth_is_held_out_and_no_image_is_in_two_parts(monkeypatch):
    def numbered(split):
        numbers = torch.arange(60) if split == "train" else torch.arange(60, 80)
        return (numbers / 100.0).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28), numbers

    monkeypatch.setitem(pixel_mnist.READ, "mnist", numbered)
    parts = pixel_mnist.load_data(PixelMnistConfig(side=14, permuted=True, train_size=0, test_size=3))
    expected = {"train": range(50), "validation": range(50, 53), "test": range(60, 63)}
    assert {name: y.tolist() for name, (_, y) in parts.items()} == {k: list(v) for k, v in expected.items()}
    for x, y in parts.values():
        torch.testing.assert_close(x, (y / 100.0).reshape(-1, 1, 1).expand(-1, 196, 1))


# Speech and music: what is predicted is the next step


def spectra(count):
    return [speech_data.log_spectra(x) for x in speech_data.tones((count, 1, 1))["train"]]


def pieces(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, (length, 88), generator=generator).to(torch.uint8) for length in lengths]


def frame_errors(y, x):
    return (y - x).square().mean(1)


def note_errors(y, x):
    return nn.functional.binary_cross_entropy(y.sigmoid(), x, reduction="none").sum(1)


SERIES = pytest.mark.parametrize(
    ("objective", "series", "name", "error"),
    [
        (speech.FrameError(), spectra(4), "mse", frame_errors),
        (polyphonic_music.NextNotes(), pieces(9, 4, 2, 7), "nll", note_errors),
    ],
    ids=["speech", "music"],
)


@SERIES
def test_the_loss_is_the_mean_over_steps_that_are_no_padding(objective, series, name, error):
    """In batches of unequal size too; that of music is the mean over pieces of the sums."""
    batch, model = as_batch(series), nn.Linear(*[series[0].shape[1]] * 2)
    errors = [error(model(x[:-1].float()), x[1:].float()).detach() for x in series]
    expected = torch.cat(errors).mean().item()
    loss, means = objective(model, batch)
    assert loss.item() == pytest.approx(expected if name == "mse" else sum(map(torch.sum, errors)).item() / 4, rel=1e-5)
    of_parts = [objective(model, tuple(x[p] for x in batch))[1][name] * len(p) / 4 for p in ([0], [1, 2, 3])]
    assert [means[name], sum(of_parts)] == pytest.approx([expected] * 2, rel=1e-5)
    if name == "nll":
        assert means["nll_by_piece"] == pytest.approx(sum(map(torch.mean, errors)).item() / 4, rel=1e-5)


@SERIES
def test_padding_and_its_hidden_states_count_nowhere(objective, series, name, error):
    """What a Hessian-free optimizer minimises: of speech half the squared error of a recording."""
    features = series[0].shape[1]
    model, batch = LayerWithReadout(nn.RNN(features, 6, batch_first=True), 6, features), as_batch(series)
    predicted, targets = objective.outputs(model, batch)
    same, _, (hidden, weight) = objective.outputs(model, batch, with_hidden=True)
    assert torch.equal(same, predicted)
    beyond = torch.arange(hidden.shape[1]) >= batch[1][:, None]
    assert weight[beyond].eq(0).all()
    assert weight[~beyond].ge(1).all()
    value, (loss, _) = objective.value(predicted, targets), objective(model, batch)
    factor = batch[1].sum() * features / 2 / len(series) if name == "mse" else 1.0
    torch.testing.assert_close(value, loss * factor)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    for row, length in zip(batch[0], batch[1].tolist(), strict=True):
        row[length + 1 :] = 1
    others = torch.autograd.grad(objective.value(*objective.outputs(model, batch)), list(model.parameters()))
    torch.testing.assert_close(gradients, others, rtol=1e-4, atol=1e-5)


# Language model


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


def test_averaging_begins_when_the_loss_ceases_to_fall():
    p = nn.Parameter(torch.zeros(2))
    averaging = awd_lstm.Averaging([p], patience=2)
    for loss, is_on in ((5.0, False), (4.0, False), (4.5, False), (4.7, False), (4.8, True), (9.0, True)):
        averaging.note(loss)
        assert averaging.is_on == is_on  # 4.8 is above 4, the best but of the last two
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


@pytest.mark.parametrize("options", [{"model": "momentum"}, {"model": "sr"}, {"model": "adam", "cell": "gru"}])
def test_the_loss_of_a_text_is_the_same_however_it_is_cut(options):
    none = dict.fromkeys(("dropout", "dropout_between", "dropout_input", "dropout_words", "weight_drop"), 0.0)
    small = {"data": "generated", "embedding": 8, "hidden": 12, "bptt": 9, "device": "cpu"}
    model = language_model.make_model(7, language_model.LanguageModelConfig(**none | small | options))
    text = torch.randint(7, (40, 3))
    with torch.no_grad():
        scores, _, raw, _ = model.eval()(text[:-1], model.fresh())
    torch.testing.assert_close(scores, raw @ model.embedding.weight.T + model.bias)
    expected = nn.functional.cross_entropy(scores.flatten(0, 1), text[1:].flatten()).item()
    for bptt in (40, 7, 1):
        assert language_model.evaluate(model, text, bptt) == pytest.approx(expected, rel=1e-5)
    assert model.training
