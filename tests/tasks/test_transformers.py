"""Tasks of transformers: models against what they must not see, losses against their definition, the papers' sizes."""

import math

import pytest
import torch
from torch import nn

from hbnode._tree import Record
from hbnode.nn.attention import KeyValueCache
from tasks import image_generation, lra, translation
from tasks.common.run import count_parameters
from tasks.data.subwords import PADDING, SPECIAL, learn_subwords
from tasks.image_generation import ImageGenerationConfig
from tasks.lra import LRAConfig
from tasks.models import logistic_mixture
from tasks.models.contenders import CONTENDERS
from tasks.models.depth import CONNECTIONS, CONTROLS, DepthConfig
from tasks.transformer_copy import CopyConfig
from tasks.translation import TranslationConfig

SMALL = {"d_model": 8, "heads": 2, "layers": 1, "feedforward": 8}
FLAGS = "--device cpu --d-model 8 --heads 2 --layers 1 --feedforward 8".split()
every_contender = pytest.mark.parametrize("model", CONTENDERS)


# Contenders and the copy task


def numbers(state):
    """Count the floating-point entries of nested states."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.is_floating_point()
    if isinstance(state, KeyValueCache):
        return state.keys.numel() + state.values.numel()
    return sum(numbers(part) for part in state) if isinstance(state, (tuple, Record)) else 0


@pytest.mark.parametrize("model", ["softmax", "momentum", "gated_delta", "heavy_ball"])
@pytest.mark.parametrize("equal", ["heads", "state"])
def test_the_size_of_the_state_is_what_a_stream_carries(model, equal):
    config = CopyConfig(model=model, equal=equal, d_model=16, heads=2)
    _, state = config.make_transformer(11).prefill(torch.zeros(1, 5, dtype=torch.int64))
    assert numbers(state) == config.state_size(5)
    sizes = {name: CopyConfig(model=name, equal=equal).state_size(48) for name in CONTENDERS}
    for one, other in (("linear", "momentum"), ("linear_gain", "adaptive"), ("gated_delta", "heavy_ball")):
        assert (sizes[one] == sizes[other]) == (equal == "state")


# Image generation


@pytest.mark.parametrize(("dataset", "side"), [("digits", None), ("mnist", 14), ("cifar10", 16)])
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


def small_images(**options):
    return ImageGenerationConfig(**{"side": 4, "logistics": 2, **SMALL} | options)


def drawn_by(model, count, config, seed):
    pixels, generator = math.prod(config.shape), torch.Generator().manual_seed(seed)
    return image_generation.draw_pixels(model, count, pixels, config.levels, generator)


def test_the_loss_is_the_mixture_of_each_pixel_given_those_before():
    model = small_images().make_model().double()
    x = torch.randint(17, (3, 16))
    loss, means = image_generation.bits_per_dimension(model, (x.byte(),), 17)
    total = 0.0
    for t in range(16):
        read = torch.cat([torch.full((3, 1), 17), x[:, :t]], dim=1)
        total -= logistic_mixture.log_probability(model(read)[:, -1], x[:, t], 17).mean().item() / 16
    assert loss.item() == pytest.approx(total, rel=1e-9)
    assert means["bits_per_dim"] == pytest.approx(total / math.log(2), rel=1e-9)


@every_contender
def test_drawing_is_reading_its_own_pixels(model):
    """Each pixel is drawn from the output for those before it, which whole sequences give too."""
    config = small_images(model=model)
    net = config.make_model().double().train()
    before = torch.random.get_rng_state()
    drawn = drawn_by(net, 3, config, seed=5)
    assert net.training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(drawn, drawn_by(net, 3, config, seed=5))
    assert not torch.equal(drawn, drawn_by(net, 3, config, seed=6))
    with torch.no_grad():
        outputs = net.eval()(image_generation.with_start(drawn, 17))
    generator = torch.Generator().manual_seed(5)
    for t in range(16):
        assert torch.equal(logistic_mixture.sample(outputs[:, t], 17, generator), drawn[:, t])


# The Long Range Arena


@pytest.mark.parametrize("model", CONTENDERS)
def test_padding_and_other_samples_change_no_score(model):
    net = lra.SequenceClassifier(LRAConfig(model=model, **SMALL)).double().eval()
    tokens, lengths = torch.randint(1, 15, (3, 9)), torch.tensor([9, 4, 1])
    scores = net(tokens, lengths)
    assert scores.shape == (3, 10)
    other = torch.where(torch.arange(9) >= lengths.unsqueeze(-1), torch.tensor(0), tokens)
    longer = torch.cat([other, torch.ones_like(other[:, :4])], dim=-1)
    torch.testing.assert_close(net(longer, lengths), scores, rtol=1e-10, atol=1e-12)
    single = net(tokens[1:2, :4], lengths[1:2])
    torch.testing.assert_close(single, scores[1:2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(20, 5), (7, 6)])
def test_the_learning_rate_is_torchs_one_cycle(steps, warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"pct_start": warmup / steps, "anneal_strategy": "linear", "cycle_momentum": False}
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps, **options)
    for step in range(steps):
        assert lra.one_cycle(step, steps, warmup) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        if step + 1 < steps:
            theirs.step()
    assert lra.one_cycle(0, steps, 1) == 1  # without a warm-up


# Language models


def depth_model(**options):
    small = {"data": "generated", "d_model": 16, "heads": 2, "feedforward": 20, "layers": 3, "context": 12}
    torch.manual_seed(0)
    return DepthConfig(**{"model": "transformer", "device": "cpu"} | small | options).make_model(41)


@pytest.mark.parametrize("options", [{}, {"layers": 6, "d_model": 64, "feedforward": 256}])
def test_controls_have_as_many_parameters(options):
    d_model, layers = options.get("d_model", 16), options.get("layers", 3)
    models = {name: depth_model(connection=name, **options) for name in (*CONNECTIONS, *CONTROLS)}
    sizes = {name: count_parameters(model) for name, model in models.items()}
    for connection, others in (("wider", layers - 1), ("deeper", layers + 1)):
        unit = 2 * d_model + 1  # parameters of a hidden unit of one layer
        assert abs(sizes[connection] - sizes["nesterov"]) <= unit * others / 2
        assert len(models[connection].layers) == others
    streams = {"heavy_ball": 4 * layers, "nesterov": 5 * layers, "scaled": 2 * layers}
    assert {name: sizes[name] - sizes["residual"] for name in streams} == streams
    tokens = torch.randint(41, (2, 12))
    torch.testing.assert_close(*(models[name].eval()(tokens) for name in ("residual", "scaled")))  # the same at first


@pytest.mark.parametrize("connection", [*CONNECTIONS, *CONTROLS])
def test_a_word_sees_none_after_it(connection):
    model = depth_model(connection=connection).double().eval()
    tokens = torch.randint(41, (1, 12))
    other = tokens.clone()
    other[0, 7:] = (tokens[0, 7:] + 1) % 41
    torch.testing.assert_close(model(tokens)[:, :7], model(other)[:, :7], atol=1e-12, rtol=0)


# Translation

WORDS = 30


def lengths_of(tokens):
    return (tokens != PADDING).sum(1)


def padded(*lengths):
    rows = [torch.randint(len(SPECIAL), WORDS, (n,)) for n in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def translator(**options):
    small = {"d_model": 16, "heads": 2, "feedforward": 20, "dropout": 0.0, "model": "momentum", "iterations": 3}
    return translation.Translator(WORDS, TranslationConfig(**small | options))


def test_corruption_changes_a_share_in_three_ways():
    tokens = padded(*[50] * 400, *[7] * 400)
    out = translation.corrupt(tokens, 0.3, WORDS)
    real = tokens != PADDING
    assert torch.equal(out != PADDING, real)
    assert 0.5 < (out == tokens)[real].float().mean().item() < 0.75  # 10 % change themselves, the next, and both
    torch.testing.assert_close(translation.corrupt(tokens, 1e-9, WORDS), tokens)
    distinct = torch.arange(len(SPECIAL), WORDS).expand(500, -1)
    out = translation.corrupt(distinct, 0.06, WORDS)
    is_next, is_swapped = out[:, 1:] == distinct[:, :-1], (out[:, :-1] == distinct[:, 1:])
    assert (is_next & is_swapped).float().mean().item() == pytest.approx(0.02, abs=0.008)
    assert is_next.float().mean().item() == pytest.approx(0.04, abs=0.012)


def test_the_source_is_spread_over_the_target():
    source = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0], [5, 6, 7, 8]])
    padding = torch.arange(6) >= torch.tensor([6, 3, 2])[:, None]
    expected = [[5, 5, 6, 6, 7, 7], [5, 5, 5, 0, 0, 0], [5, 7, 0, 0, 0, 0]]
    assert translation.spread(source, padding).tolist() == expected


@pytest.mark.parametrize("model", TranslationConfig.models)
def test_padding_and_other_sentences_change_no_translation(model):
    net = translator(model=model).double().eval()
    source, target = padded(5, 3), padded(6, 2)
    with torch.no_grad():
        scores, offset = net(source, target)
        passes = net.translate(source)
        single, single_offset = net(source[1:, :3], target[1:, :2])
        wide = net.translate(nn.functional.pad(source, (0, 4)))
    for one, two in zip(scores, single, strict=True):
        torch.testing.assert_close(one[1:, :2], two, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(offset[1:], single_offset, atol=1e-10, rtol=1e-9)
    assert all(torch.equal(*pair) for pair in zip(passes, wide, strict=True))


def test_cross_entropy_is_the_mean_of_the_passes():
    net = translator(refinements=2).eval()
    source, target = padded(5, 3), nn.functional.pad(padded(6, 2), (0, 3))
    loss, means = translation.cross_entropy(net, (source, target))
    scores, offset = net(source, target[:, :6])
    chances = [score.log_softmax(-1).gather(2, target[:, :6, None])[target[:, :6] != PADDING] for score in scores]
    assert means["last_pass"] == pytest.approx(-chances[1].mean().item(), rel=1e-5)
    assert means["loss"] == pytest.approx(-torch.stack(chances).mean().item(), rel=1e-5)
    of_length = -offset.log_softmax(-1)[[0, 1], [translation.MAX_OFFSET + 1, translation.MAX_OFFSET - 1]].mean()
    torch.testing.assert_close(loss, -torch.stack(chances).mean() + of_length)


def test_bleu_and_repeated_words():
    pairs = [("The dog sees a cat.", "Der Hund sieht eine Katze."), ("I go.", "Ich gehe jetzt nach Hause.")]
    judge = translation.Judge(pairs, learn_subwords(["The dog"], 100), 2, torch.device("cpu"))
    assert judge.bleu([german for _, german in pairs]) == pytest.approx(100)
    assert judge.bleu(["x"] * 2) < 10
    assert translation.without_repeats("a a b b. b. a") == "a b b. a"
