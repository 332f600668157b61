"""Tasks of transformers: models against what they must not see, losses against their definition, the papers' sizes."""

import math

import pytest
import torch
from torch import nn

from tasks import image_generation, lra, translation
from tasks.common.run import count_parameters
from tasks.data.subwords import PADDING, SPECIAL
from tasks.image_generation import ImageGenerationConfig
from tasks.lra import LRAConfig
from tasks.models import logistic_mixture
from tasks.models.contenders import CONTENDERS
from tasks.models.depth import CONNECTIONS, CONTROLS, DepthConfig
from tasks.transformer_copy import CopyConfig
from tasks.translation import TranslationConfig

SMALL = {"d_model": 8, "heads": 2, "layers": 1, "feedforward": 8}


def test_contenders_have_states_of_equal_size():
    for equal in ("heads", "state"):
        sizes = {name: CopyConfig(model=name, equal=equal).state_size(48) for name in CONTENDERS}
        for one, other in (("linear", "momentum"), ("linear_gain", "adaptive"), ("gated_delta", "heavy_ball")):
            assert (sizes[one] == sizes[other]) == (equal == "state")


# Image generation


@pytest.mark.parametrize(("dataset", "side"), [("digits", None), ("mnist", 14), ("cifar10", 16)])
def test_sequences_are_the_levels_of_the_smaller_image(dataset, side):
    """Channels of a pixel follow one another."""
    config = ImageGenerationConfig(dataset=dataset, side=side)
    channels, edge, _ = image_generation.SHAPE[dataset]
    images = torch.rand(2, channels, edge, edge, dtype=torch.float64)
    smaller = nn.functional.avg_pool2d(images, edge // config.shape[0])
    expected = smaller.permute(0, 2, 3, 1).flatten(1) * (config.levels - 1)
    assert ((image_generation.sequences(images, config) - expected).abs() <= 0.5 + 1e-9).all()


# logits, means and scales of two mixtures; the second has components beyond both ends, and one between two levels
MIXTURES = [
    [(0.2, -0.5, 0.3), (0.7, 0.1, 0.1), (-1.0, 0.9, 0.02)],
    [(0.0, -1.4, 0.1), (0.5, 1.3, 0.2), (1.0, 0.031, 1e-3)],
]


def parameters(mixture):
    logits, means, scales = zip(*mixture, strict=True)
    return torch.tensor([*logits, *means, *(math.log(scale) for scale in scales)], dtype=torch.float64)


def probabilities(mixture, levels):
    """P of the docstring: differences of the distribution function between two levels."""
    logits, means, scales = torch.tensor(mixture, dtype=torch.float64).T
    edges = (2 * torch.arange(1, levels, dtype=torch.float64) - 1) / (levels - 1) - 1
    below = ((edges[:, None] - means) / scales).sigmoid() @ logits.softmax(0)
    return nn.functional.pad(nn.functional.pad(below, (1, 0)), (0, 1), value=1.0).diff()


@pytest.mark.parametrize("mixture", MIXTURES, ids=["inside", "beyond"])
def test_the_mixture_of_logistics_is_its_equation_and_the_sampler_follows_it(mixture):
    count, p = 200_000, parameters(mixture)
    for levels in (2, 17, 256):
        expected = probabilities(mixture, levels)
        found = logistic_mixture.log_probability(p.expand(levels, -1), torch.arange(levels), levels).exp()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
        drawn = logistic_mixture.sample(p.expand(count, -1).float(), levels, torch.Generator().manual_seed(0))
        error = (expected * (1 - expected) / count).sqrt() + 1e-9
        assert ((drawn.bincount(minlength=levels) / count - expected).abs() / error).max() < 4


@pytest.mark.parametrize(("mean", "log_scale"), [(-50.0, -1e4), (0.0, -1e4), (0.0, 100.0)])
def test_extreme_mixtures_sum_to_one_with_finite_gradients_in_float32(mean, log_scale):
    p = torch.tensor([0.0, mean, log_scale], requires_grad=True)
    found = logistic_mixture.log_probability(p.expand(256, -1), torch.arange(256), 256)
    assert found.exp().sum().item() == pytest.approx(1, abs=1e-4)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert gradient.isfinite().all()


def test_the_loss_is_the_mixture_of_each_pixel_given_those_before():
    model = ImageGenerationConfig(side=4, logistics=2, **SMALL).make_model().double()
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
    """Each pixel is drawn from the output for those before it, which whole sequences give too."""
    net = ImageGenerationConfig(model=model, side=4, logistics=2, **SMALL).make_model().double().train()
    drawn = image_generation.draw_pixels(net, 3, 16, 17, torch.Generator().manual_seed(5))
    assert net.training
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
    longer = torch.cat([tokens, torch.ones_like(tokens[:, :4])], dim=-1)
    torch.testing.assert_close(net(longer, lengths), scores, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(net(tokens[1:2, :4], lengths[1:2]), scores[1:2], rtol=1e-10, atol=1e-12)


def test_the_learning_rate_is_torchs_one_cycle():
    steps, warmup = 20, 5
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


def depth_model(connection):
    small = {"model": "transformer", "data": "generated", "d_model": 16, "heads": 2, "feedforward": 20, "layers": 3}
    return DepthConfig(**small, device="cpu", context=12, connection=connection).make_model(41)


def test_controls_have_as_many_parameters():
    models = {name: depth_model(name) for name in (*CONNECTIONS, *CONTROLS)}
    sizes = {name: count_parameters(model) for name, model in models.items()}
    unit = 2 * 16 + 1  # parameters of a hidden unit of one layer
    for connection, layers in (("wider", 2), ("deeper", 4)):
        assert abs(sizes[connection] - sizes["nesterov"]) <= unit * layers / 2
        assert len(models[connection].layers) == layers


@pytest.mark.parametrize("connection", [*CONNECTIONS, *CONTROLS])
def test_a_word_sees_none_after_it(connection):
    model = depth_model(connection).double().eval()
    tokens = torch.randint(41, (1, 12))
    other = tokens.clone()
    other[0, 7:] = (tokens[0, 7:] + 1) % 41
    torch.testing.assert_close(model(tokens)[:, :7], model(other)[:, :7], atol=1e-12, rtol=0)


# Translation

WORDS = 30


def padded(*lengths):
    rows = [torch.randint(len(SPECIAL), WORDS, (n,)) for n in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def translator(**options):
    return translation.Translator(WORDS, TranslationConfig(**SMALL, dropout=0.0, iterations=3, **options))


def test_corruption_changes_a_share_in_three_ways():
    tokens = padded(*[50] * 400, *[7] * 400)
    out = translation.corrupt(tokens, 0.3, WORDS)
    real = tokens != PADDING
    assert torch.equal(out != PADDING, real)
    assert 0.5 < (out == tokens)[real].float().mean().item() < 0.75  # 10 % change themselves, the next, and both
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
    net = translator(model="momentum", refinements=2).eval()
    source, target = padded(5, 3), nn.functional.pad(padded(6, 2), (0, 3))
    loss, means = translation.cross_entropy(net, (source, target))
    scores, offset = net(source, target[:, :6])
    chances = [score.log_softmax(-1).gather(2, target[:, :6, None])[target[:, :6] != PADDING] for score in scores]
    assert means["last_pass"] == pytest.approx(-chances[1].mean().item(), rel=1e-5)
    assert means["loss"] == pytest.approx(-torch.stack(chances).mean().item(), rel=1e-5)
    of_length = -offset.log_softmax(-1)[[0, 1], [translation.MAX_OFFSET + 1, translation.MAX_OFFSET - 1]].mean()
    torch.testing.assert_close(loss, -torch.stack(chances).mean() + of_length)
