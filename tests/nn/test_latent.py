"""Latent ODEs and SDEs: bounds against dense Gaussians and closed forms, missing values, predictions, failures."""

import itertools
import math
from datetime import date

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal, StudentT, kl_divergence

import hbnode
from hbnode.nn import LatentODE, LatentSDE
from hbnode.nn.sequences import Sequences


def timed_sde():
    net = hbnode.nn.MLP(4, [5], 4, time_dependent=True)
    return hbnode.HeavyBallSDE(net, damping=torch.tensor([0.2, 0.4, 0.6, 0.8]), temperature=0.3, learn_temperature=True)


MODELS = {
    "sonode": lambda: LatentODE(2, 4, 8, field=hbnode.SONODE(nn.Bilinear(4, 4, 4))),
    "hbnode": lambda: LatentODE(2, 4, 8, field=hbnode.HBNODE(nn.Linear(4, 4), initial_momentum=nn.Linear(4, 4))),
    "adam": lambda: LatentODE(2, 4, 8, field=hbnode.AdamNODE(nn.Linear(4, 4))),
    "student": lambda: LatentODE(2, 4, 8, likelihood="student"),
    "sde": lambda: LatentSDE(2, 4, 8),
    "sde_given": lambda: LatentSDE(2, 4, 8, sde=timed_sde()),
    "sde_odernn": lambda: LatentSDE(2, 4, 8, encoder=hbnode.ODERNN(2, 5, rtol=1e-3, atol=1e-3)),
    "sde_checkpoint": lambda: LatentSDE(2, 4, 8, gradient="checkpoint", likelihood="student"),
}


def series(dtype=torch.float32, batch=3, length=6):
    torch.manual_seed(1)
    t = torch.rand(batch, length, dtype=torch.float64).cumsum(1)
    return torch.randn(batch, length, 2, dtype=dtype), t, torch.rand(batch, length, 2) < 0.7


@pytest.fixture
def sigma_points(monkeypatch):
    """Replace draws of the initial state by points at which means of quadratic functions are exact."""

    def rsample(self, shape):
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=self.mean.shape[-1]))).to(self.mean)
        assert shape == (len(signs),)
        return self.mean + signs.unsqueeze(1) * self.stddev

    monkeypatch.setattr(Normal, "rsample", rsample)


class Fixed(nn.Module):
    """An encoder that ignores its input."""

    hidden_size = 3

    def forward(self, x, t, mask, lengths):
        return torch.ones(*x.shape[:2], 3, dtype=x.dtype), None


def linear_model(**options):
    """h'' + 0.3 h' = -2 h, with two features that are linear in h, and any normal posterior."""
    torch.manual_seed(0)
    field = hbnode.HBNODE(lambda h: -2 * h, damping=0.3, learn_damping=False)
    model = LatentODE(2, 1, field=field, encoder=Fixed(), rtol=1e-10, atol=1e-10, **options).double()
    for p in (model.prior, model.log_noise):
        nn.init.normal_(p, std=0.5)
    return model


def design(model, t):
    """The matrix (T, input_size, 2) of the decoder's mean, without bias, as a function of (h, m) at the time 0."""
    a = torch.tensor([[0.0, 1.0], [-2.0, -0.3]]).double()
    return torch.stack([model.decoder.weight @ torch.linalg.matrix_exp(a * time)[:1] for time in t])


@torch.no_grad()
def exact_posterior(model, x, t, mask):
    """The exact log-likelihood and the posterior of a series, by dense Gaussians."""
    h = design(model, t - t[0])[mask]
    noise = (2 * model.log_noise).exp().expand(mask.shape)[mask].diag()
    prior = MultivariateNormal(model.prior[0], (2 * model.prior[1]).exp().diag())
    residual = (x - model.decoder.bias)[mask]
    marginal = MultivariateNormal(h @ prior.mean, h @ prior.covariance_matrix @ h.T + noise)
    precision = prior.precision_matrix + h.T @ noise.inverse() @ h
    mean = precision.inverse() @ (prior.precision_matrix @ prior.mean + h.T @ noise.inverse() @ residual)
    return marginal.log_prob(residual), MultivariateNormal(mean, precision_matrix=precision)


def test_log_likelihood_less_elbo_is_the_divergence_from_the_exact_posterior(sigma_points):
    model = linear_model()
    x, t, mask = series(torch.float64)
    elbo = model.elbo(x, t, mask, samples=4)
    mean, log_std = model.posterior(torch.ones(3, dtype=torch.float64)).chunk(2)
    q = MultivariateNormal(mean, log_std.exp().square().diag())
    prior = MultivariateNormal(model.prior[0], (2 * model.prior[1]).exp().diag())
    torch.testing.assert_close(elbo.kl_initial, kl_divergence(q, prior).expand(3), rtol=1e-12, atol=0)
    for i in range(3):
        log_likelihood, posterior = exact_posterior(model, x[i], t[i], mask[i])
        gap = log_likelihood - elbo.value[i]
        torch.testing.assert_close(gap, kl_divergence(q, posterior), rtol=1e-7, atol=1e-7)
    half = model.elbo(x, t, mask, samples=4, beta=0.5)
    torch.testing.assert_close(half.value - elbo.value, elbo.kl_initial / 2)


def test_predictions_have_the_moments_of_the_posterior_at_any_times_in_any_order(sigma_points):
    model = linear_model()
    x, t, _ = series(torch.float64)
    at = t[:, :1] + torch.tensor([4.0, 0.0, 9.0, 1.3, 1.3])  # forecasts and interpolation
    prediction = model.predict(x, t, at=at, samples=4)
    mean, log_std = model.posterior(torch.ones(3, dtype=torch.float64)).chunk(2)
    h = design(model, at[0] - t[0, 0])
    torch.testing.assert_close(prediction.mean[1], h @ mean + model.decoder.bias, rtol=1e-6, atol=1e-6)
    variance = (h @ log_std.exp()[:, None].square().diagflat() @ h.mT).diagonal(dim1=1, dim2=2)
    expected = (variance + (2 * model.log_noise).exp()).sqrt()
    torch.testing.assert_close(prediction.std[2], expected, rtol=1e-6, atol=1e-6)
    same = model.predict(x, t, at=t, samples=4).paths
    torch.testing.assert_close(same, model.predict(x, t, samples=4).paths, rtol=1e-7, atol=1e-7)


# The divergence of paths


class Proportional(nn.Module):
    """The control u = k h."""

    k = 0.8

    def forward(self, h):
        return self.k * h[:, :1]


def path_divergence(temperature, h, m, span):
    """∫ E[u²]/2 for dm = (-γm - 3h + s u) dt + s dW and u = k h, from the linear equation of the second moments."""
    s, gamma, k = math.sqrt(2 * 0.7 * temperature), 0.7, Proportional.k
    c = 3 - s * k
    a = torch.zeros(5, 5, dtype=torch.float64)  # of E[h²], E[hm], E[m²], 1 and the integral
    a[0, 1], a[1, 2], a[1, 0], a[1, 1] = 2.0, 1.0, -c, -gamma
    a[2, 1], a[2, 2], a[2, 3], a[4, 0] = -2 * c, -2 * gamma, s**2, k**2 / 2
    start = torch.tensor([h * h, h * m, m * m, 1.0, 0.0], dtype=torch.float64)
    return (torch.linalg.matrix_exp(a * span) @ start)[4].item()


def test_the_mean_divergence_of_paths_with_a_linear_control_has_a_closed_form():
    sde = hbnode.HeavyBallSDE(lambda h: -3 * h, damping=0.7, temperature=0.5, learn_damping=False)
    model = LatentSDE(1, 1, sde=sde, control=Proportional(), encoder=Fixed(), dt=0.02).double()
    t, count = torch.tensor([[0.0, 0.3, 1.0, 2.0]]).double(), 4000
    _, guide = model.encode(Sequences(1, torch.zeros(1, 4, 1).double(), t, None, None), None, t)
    _, kl = model.solve(torch.tensor([[1.0, -0.5]]).double().expand(count, 2), t.expand(count, 4), guide)
    expected, error = path_divergence(0.5, 1.0, -0.5, 2.0), kl.std().item() / count**0.5
    assert abs(kl.mean().item() - expected) < 4 * error
    assert error < 0.02 * expected


def test_the_control_depends_on_later_samples_only():
    model = LatentSDE(2, 4, 8).double()
    x, t, mask = series(torch.float64, batch=2)
    mask[0, 3], mask[1, -1] = False, False
    x.requires_grad_()
    grid = torch.cat([t, t[:, -1:] + 1], 1)
    _, guide = model.encode(Sequences(2, x, t, mask, None), None, grid)
    between = grid[:, :-1] + 0.4 * grid.diff()
    for i, at in enumerate([*between.split(1, 1), grid[:, -1:]]):
        control = guide.control(model.control, at - guide.start, x.new_ones(2, 4)).sum()
        (gradient,) = torch.autograd.grad(control, x, retain_graph=True, materialize_grads=True)
        assert torch.equal(gradient.abs().sum(-1) > 0, mask.any(-1) & (t > at)), i


def test_late_times_keep_their_digits_in_a_float32_model():
    model, (x, t, mask), bounds = LatentSDE(2, 4, 8), series(), []
    nn.init.normal_(model.control.layers[-1].weight)  # a control that matters
    for origin in (0.0, 1.7e9):
        torch.manual_seed(2)
        bounds.append(model.elbo(x, origin + t, mask=mask).value)
    torch.testing.assert_close(bounds[1], bounds[0], rtol=1e-4, atol=0.0)


# All models


@pytest.mark.sparse
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_the_bound_has_a_gradient_of_every_parameter(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    x, t, mask = series(dtype)
    elbo = model(x, t, mask, lengths=[6, 4, 1], samples=2)
    elbo.value.sum().backward()
    torch.testing.assert_close(elbo.value, elbo.log_likelihood - elbo.kl_initial - elbo.kl_path)
    assert elbo.value.dtype == dtype
    assert elbo.value.shape == elbo.kl_path.shape == (3,)
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert p.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", ["hbnode", "student", "sde_odernn"])
def test_values_behind_masks_and_padding_have_no_effect(name):
    model, lengths = MODELS[name](), torch.tensor([6, 4, 1])
    x, t, mask = series()

    def values(x, t, mask):
        torch.manual_seed(2)
        bound, ahead = model.elbo(x, t, mask, lengths), model.predict(x, t, mask, lengths, at=[9.0, 10.0], samples=3)
        return bound.value, ahead.paths

    is_padding = torch.arange(6) >= lengths[:, None]
    changed = x.masked_fill(~mask | is_padding[..., None], torch.nan)
    later, hidden = t.masked_fill(is_padding, -5.0), mask | is_padding[..., None]
    torch.testing.assert_close(values(x, t, mask), values(changed, later, hidden), rtol=0, atol=0)


def test_samples_without_values_and_other_series_have_no_effect(sigma_points):
    model, (x, t, mask) = LatentODE(2, 1, 8).double(), series(torch.float64)
    mask[:, 0] = True
    mask[1, 2] = False
    value, kept = model.elbo(x, t, mask, samples=4).value, [0, 1, 3, 4, 5]
    shorter = model.elbo(x[1:2, kept], t[1:2, kept], mask[1:2, kept], samples=4)
    torch.testing.assert_close(shorter.value, value[1:2], rtol=1e-3, atol=1e-3)  # the solver's tolerance


@pytest.mark.parametrize("name", ["hbnode", "sde"])
def test_one_sample_no_value_and_a_first_call_in_inference_mode(name):
    model = MODELS[name]()
    x, t, _ = series(batch=1, length=1)
    with torch.inference_mode():
        one = model.predict(x, t, at=t + torch.tensor([0.0, 2.0]), samples=5)
        nothing = model.elbo(x, t, torch.zeros(1, 1, dtype=torch.bool))
    assert one.paths.isfinite().all()
    assert nothing.log_likelihood == 0
    model.elbo(torch.randn(2, 4, 2), torch.tensor([0.0, 1.0, 1.0, 2.0])).value.sum().backward()  # equal times
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.sample([0.0, 1.0, 5.0], samples=3).paths.shape == (3, 1, 3, 2)


@pytest.mark.parametrize("name", ["hbnode", "sde"])
def test_the_unit_of_time_does_not_matter_once_it_is_fitted(name):
    model, (x, t, mask), found = MODELS[name](), series(), []
    for scale in (1.0, 1024.0):
        model.fit_time_unit(scale * t, mask)
        torch.manual_seed(1)
        ahead = model.predict(x, scale * t, mask, at=scale * torch.tensor([8.0, 9.0]), samples=2)
        found.append(ahead.paths)
    torch.testing.assert_close(*found)


def test_the_mixture_of_a_prediction():
    paths = torch.randn(5, 2, 3, 2, dtype=torch.float64)
    scale, freedom = torch.tensor([0.5, 2.0]).double(), torch.tensor([3.0, 8.0]).double()
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    for prediction, kind in (
        (hbnode.nn.LatentPrediction(paths, scale), Normal(paths, scale)),
        (hbnode.nn.LatentPrediction(paths, scale, freedom), StudentT(freedom, paths, scale)),
    ):
        torch.testing.assert_close(prediction.log_prob(x), kind.log_prob(x).exp().mean(0).log())
        variance = kind.variance.mean(0) + kind.mean.square().mean(0) - kind.mean.mean(0).square()
        torch.testing.assert_close(prediction.std, variance.sqrt())
    many = hbnode.nn.LatentPrediction(torch.zeros(40_000, 1, 1, 2).double(), scale)
    expected = scale * torch.tensor([[-1.2816], [0.0]])
    torch.testing.assert_close(many.quantile([0.1, 0.5])[:, 0, 0], expected.double(), rtol=0.03, atol=0.05)


def test_static_features():
    model, (x, t, _) = LatentODE(2, 2, 8, static_size=1), series()
    static = torch.zeros(3, 1, requires_grad=True)
    model.elbo(x, t, static=static).value.sum().backward()
    assert (static.grad != 0).all()


def test_wrong_uses():
    (x, t, _), small = series(), LatentODE(2, 4, 8)
    for message, use in (
        ("Fix: likelihood='student'", lambda: LatentODE(2, 2, likelihood="studnt")),
        ("must be a field, got Linear", lambda: LatentODE(2, 2, field=nn.Linear(2, 2))),
        (r"shape \(3, 6, 1\)", lambda: LatentODE(2, 4, 8, decoder=nn.Linear(4, 1)).elbo(x, t)),
        ("control returned", lambda: LatentSDE(2, 4, 8, control=nn.Linear(13, 1)).elbo(x, t)),
        ("before the first of t", lambda: small.predict(x, t, at=[0.0, 3.0])),
        (r"Fix: series.times\(at\)", lambda: small.predict(x, t, at=[date(2024, 1, 1)])),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            use()
