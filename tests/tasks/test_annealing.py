"""The task of annealing: exact normalising constants, a small run, and that it goes on where it was."""

import csv
import math

import pytest
import torch

from tasks import annealing
from tests.models import slow


def test_log_z_of_the_many_well_is_that_of_its_pairs():
    target = annealing.many_well()
    a, b = torch.linspace(-5, 5, 801, dtype=torch.float64), torch.linspace(-9, 9, 201, dtype=torch.float64)
    x = torch.zeros(len(a) * len(b), 50, dtype=torch.float64)
    x[:, :2] = torch.cartesian_prod(a, b)
    density = target.log_prob(x).exp().view(len(a), len(b))
    of_pair = torch.trapezoid(torch.trapezoid(density, b), a).log().item()
    assert target.log_z == pytest.approx(25 * of_pair, rel=1e-9)


def test_the_funnel_is_normalised():
    target = annealing.funnel()
    torch.manual_seed(0)
    v = 3 * torch.randn(5, dtype=torch.float64)
    x = torch.cat([v[:, None], torch.randn(5, 9, dtype=torch.float64) * (v / 2).exp()[:, None]], 1)
    first = torch.distributions.Normal(0, 3).log_prob(v)
    rest = torch.distributions.Normal(0, (v / 2).exp()[:, None]).log_prob(x[:, 1:]).sum(1)
    torch.testing.assert_close(target.log_prob(x), first + rest)


def test_logistic_regression_is_likelihood_times_prior():
    target = annealing.cancer()
    assert target.dim == 31
    at_zero = target.log_prob(torch.zeros(1, 31)).item()
    assert at_zero == pytest.approx(569 * math.log(0.5) - 15.5 * math.log(2 * math.pi), rel=1e-5)


@pytest.mark.parametrize("sampler", slow(*annealing.DAMPINGS))
def test_training_raises_the_bound(sampler):
    options = annealing.AnnealingOptions(paths=800, iterations=80)
    model = annealing.tune(annealing.many_well(), sampler, 4, options)
    trained = annealing.train(model, options)
    before, after = (annealing.bound(one, 400, 17) for one in (model, trained))
    assert after > before + 1


def test_an_unknown_log_z_is_the_best_estimate_and_other_options_are_refused(tmp_path, capsys):
    arguments = "--targets cancer --evaluations 2 --iterations 0 --paths 16 --out".split()
    annealing.main([*arguments, str(tmp_path)])
    with (tmp_path / "annealing.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    best = min(rows, key=lambda row: float(row["log_z_error"]))
    assert {row["log_z"] for row in rows} == {best["log_z_estimate"]}
    assert "logistic regression, d = 31: log Z = " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has other options.*Fix: --out another-folder"):
        annealing.main([*arguments, str(tmp_path), "--seed", "1"])
