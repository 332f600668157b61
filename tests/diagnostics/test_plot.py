"""hbnode.diagnostics.plot: what is drawn is the data, on the given axes, whatever kind of array the data are."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from hbnode.diagnostics import plot, spectrum

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def spring(**options):
    """A heavy ball on a spring: h'' + 0.2 h' + h = 0."""
    return hbnode.HeavyBallODEBlock(lambda h: -h, damping=0.2, learn_damping=False, t_span=(0.0, 8.0), **options)


def duffing():
    return hbnode.HeavyBallODEBlock(nn.Linear(2, 2), damping=0.5, t_span=(0.0, 3.0))


def data_of(ax):
    return [np.stack([line.get_xdata(), line.get_ydata()]) for line in ax.get_lines()]


REFERENCE = hbnode.diagnostics.Reference(1e-6, 1e-7, 1e-6)
CURVE = hbnode.diagnostics.NFEToleranceCurve([1e-2, 1e-4], [8, 20], [10, 30], [1e-3, 1e-5], [1e-2, 1e-4], REFERENCE)
RECORD = hbnode.diagnostics.StepRecord(
    [0.0, 0.5, 0.5], [0.5, 2.0, 0.25], [True, False, True], [None] * 3, [False, False, True]
)
CALLS = {
    "trajectories": lambda **k: plot.trajectories(torch.randn(5, 3, 2), range(5), **k),
    "phase_portrait": lambda **k: plot.phase_portrait((torch.randn(5, 3, 2), torch.randn(5, 3, 2)), **k),
    "vector_field": lambda **k: plot.vector_field(spring(), **k),
    "steps": lambda **k: plot.steps(RECORD, **k),
    "tolerance_curve": lambda **k: plot.tolerance_curve({"one": CURVE, "two": CURVE}, **k),
    "spectrum": lambda **k: plot.spectrum(duffing(), torch.ones(2, 2), **k),
    "adjoint_norms": lambda **k: hbnode.diagnostics.adjoint_norms(duffing(), torch.ones(2, 2), [0.0, 1.0]).plot(**k),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_plot_draws_into_the_given_axes_and_passes_arguments_on(name, monkeypatch):
    figure, (left, right) = plt.subplots(1, 2)
    assert CALLS[name](ax=right, zorder=7) is right
    assert not left.has_data()
    assert right.has_data()
    assert right.get_xlabel()
    assert right.get_ylabel()
    assert 7 in {artist.get_zorder() for artist in (*right.get_lines(), *right.collections)}
    assert plt.get_fignums() == [figure.number]
    assert CALLS[name]().figure is not figure
    assert len(plt.get_fignums()) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"needs matplotlib. Fix: pip install matplotlib"):
        CALLS[name]()


def test_trajectories_draw_the_numbers_that_they_are_given():
    h, t = torch.randn(6, 2, 3), torch.linspace(0, 1, 6)
    ax = plot.trajectories(h, t, features=[2, 0], samples=slice(1, None))
    first, second = data_of(ax)
    np.testing.assert_allclose(first, np.stack([t, h[:, 1, 2]]))
    np.testing.assert_allclose(second, np.stack([t, h[:, 1, 0]]))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$h_{2}$", "$h_{0}$"]
    for data in (h.tolist(), h.numpy(), list(h), h.clone().requires_grad_(), h.half(), (h, -h)):
        drawn = data_of(plot.trajectories(data, t.tolist()))
        np.testing.assert_allclose(drawn[0][1], h[:, 0, 0], atol=1e-2)
        assert len(drawn) == 6
    (line,) = plot.trajectories(h[:, 0, 0], label="mine", color="red", lw=3).get_lines()
    assert (line.get_label(), line.get_color(), line.get_linewidth()) == ("mine", "red", 3)
    assert not plot.trajectories(duffing(), torch.randn(0, 2)).get_lines()


CHOICES = [[False, False, True, True], list(np.arange(4) > 1), torch.tensor([2, 3]), np.array([-2, 3]), slice(2, None)]


@pytest.mark.parametrize("chosen", CHOICES)
def test_samples_and_features_by_masks_and_indices(chosen):
    h = torch.arange(4.0).view(1, 4, 1).repeat(5, 1, 1)
    assert [line[1][0] for line in data_of(plot.trajectories(h, samples=chosen))] == [2, 3]
    assert [line[1][0] for line in data_of(plot.trajectories(h.mT, features=chosen))] == [2, 3]
    assert plot.phase_portrait(h.mT, features=chosen).get_xlabel() == "$h_{2}$"


@pytest.mark.parametrize("method", ["leapfrog", "rk4"])
def test_a_block_on_a_grid_is_drawn_at_the_points_of_its_grid(method):
    block = spring(method=method, steps=4)
    x = torch.ones(1, 1)
    with torch.no_grad():
        end = block(x)
    nfe = block.nfe
    (line,) = data_of(plot.trajectories(block, x))
    np.testing.assert_allclose(line[0], [0, 2, 4, 6, 8])
    assert line[1][-1] == pytest.approx(end.item(), rel=1e-5)
    assert block.nfe is nfe


def test_a_block_stays_as_it_is():
    block = hbnode.HeavyBallODEBlock(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)))
    block.field.func[2].eval()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    x = torch.randn(3, 2, requires_grad=True)
    plot.trajectories(block, x)
    plot.vector_field(block, at=torch.zeros(2))
    plot.spectrum(block, x)
    plot.steps(block, x)
    assert [module.training for module in block.modules()] == [True, True, True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert x.grad is None
    assert block.nfe.total == 0


def test_phase_portraits():
    block, x = spring().double(), torch.tensor([[1.0], [-0.5]], dtype=torch.float64)
    h, m = hbnode.odeint(block.field, block.field.initial_state(x), [0.0, 1.0, 2.0])
    for arguments in ((block, x, [0.0, 1.0, 2.0]), ((h, m),), (h.tolist(), m.tolist())):
        drawn = data_of(plot.phase_portrait(*arguments))
        np.testing.assert_allclose(drawn[0], np.stack([h[:, 0, 0], m[:, 0, 0]]))
        np.testing.assert_allclose(drawn[1], [[1.0], [0.0]])  # where it starts
        np.testing.assert_allclose(drawn[2], np.stack([h[:, 1, 0], m[:, 1, 0]]))
    sonode = hbnode.ODEBlock(hbnode.SONODE(lambda h, v: -h - v))
    assert plot.phase_portrait(sonode, x).get_ylabel() == "$v$"


FRICTION = torch.tensor([[0.0, 1.0], [-1.0, -0.2]])
FIELDS = {
    "spring": (spring(), {}),
    "GHBNODE": (hbnode.GHBNODE(lambda h: -h, damping=0.2, xi=0.0, learn_xi=False, activation=nn.Identity()), {}),
    "NODE": (hbnode.NODE(lambda h: h @ FRICTION.T), {}),
    "callable": (lambda t, y: y @ FRICTION.T, {}),
    "pair": (lambda t, y: (y[1], -y[0] - 0.2 * y[1]), {"at": (torch.zeros(1), torch.zeros(1))}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_vector_field_is_the_derivative_in_direction_and_speed(name):
    """Of a spring with friction: (h, m)' = (m, -h - 0.2 m); for the others the same by other means."""
    field, options = FIELDS[name]
    ax = plot.vector_field(field, xlim=(0.0, 2.0), ylim=(-1.0, 1.0), points=4, **options)
    (arrows,) = ax.collections
    h, m = arrows.X, arrows.Y
    np.testing.assert_allclose(np.unique(h), [0.25, 0.75, 1.25, 1.75])
    speed = np.hypot(m, -h - 0.2 * m)
    np.testing.assert_allclose(arrows.get_array(), speed.ravel(), rtol=1e-5)
    np.testing.assert_allclose(arrows.U, (m / speed).ravel(), rtol=1e-5)
    np.testing.assert_allclose(arrows.V, ((-h - 0.2 * m) / speed).ravel(), rtol=1e-5)
    portrait = plot.phase_portrait(spring(), torch.ones(1, 1))
    limits = portrait.get_xlim(), portrait.get_ylim()
    plot.vector_field(field, ax=portrait, **options)  # keeps to what is drawn
    assert (portrait.get_xlim(), portrait.get_ylim()) == limits


def test_a_vector_field_in_a_plane_of_more_dimensions_and_at_a_time():
    a = torch.randn(3, 3)
    field = hbnode.NODE(lambda t, h: t * h @ a.T)
    ax = plot.vector_field(field, 2.0, at=[5.0, 6.0, 7.0], features=(2, 0), xlim=(1, 2), ylim=(3, 4), points=1)
    value = (2.0 * a @ torch.tensor([3.5, 6.0, 1.5])).numpy()
    (arrow,) = ax.collections
    direction = np.array([value[2], value[0]]) / np.hypot(value[2], value[0])
    np.testing.assert_allclose([arrow.U[0], arrow.V[0]], direction, rtol=1e-5)
    forced = hbnode.HBNODE(lambda h: 0 * h + torch.tensor([0.0, 1.0, 0.0]))
    (arrow,) = plot.vector_field(forced, at=torch.zeros(3), features=1).collections
    assert arrow.V.max() > 0.9  # the force of feature 1
    still = plot.vector_field(hbnode.NODE(lambda h: 0 * h), points=2)
    assert not np.hypot(still.collections[0].U, still.collections[0].V).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_vector_field_is_found_in_the_dtype_of_f_or_of_the_state(dtype):
    """Of a block whose own parameters are float32 beside an f of another dtype, and of a function without any."""
    seen = []

    def field(t, h):
        seen.append((t.dtype, h.dtype))
        return h @ torch.eye(2, dtype=h.dtype)

    block = hbnode.HeavyBallODEBlock(nn.Linear(1, 1).to(dtype))
    for at in (None, [0.0], torch.zeros(1, dtype=dtype)):
        plot.vector_field(block, at=at, points=2)
        plot.trajectories(block, [[1.0]])
    for at in (None, [0.0, 0.0], torch.zeros(2, dtype=dtype)):
        plot.vector_field(field, at=at, points=2)
    assert seen == [(torch.float32, torch.float32)] * 2 + [(dtype, dtype)]


def test_steps_are_marked():
    ax = plot.steps(RECORD)
    drawn = dict(zip([line.get_label() for line in ax.get_lines()], data_of(ax), strict=True))
    expected = {"accepted": [[0.0], [0.5]], "rejected": [[0.5], [2.0]], "adjoint, accepted": [[0.5], [0.25]]}
    assert {label: line.tolist() for label, line in drawn.items()} == expected
    block = spring(rtol=1e-7, atol=1e-7)
    ax = plot.steps(block, torch.ones(1, 1), markersize=3)
    with torch.no_grad():
        block(torch.ones(1, 1))
    assert sum(len(line.get_xdata()) for line in ax.get_lines()) == block.nfe.steps + block.nfe.rejected


def test_tolerance_curves():
    ax = plot.tolerance_curve(CURVE)
    lines = [*ax.get_lines(), *ax.figure.axes[1].get_lines()]
    expected = [CURVE.forward, CURVE.backward, CURVE.error, CURVE.gradient_error]
    assert [list(line.get_ydata()) for line in lines] == expected
    assert CURVE.plot(ax) is ax  # into the same axes, whose direction and right axis stay
    assert (ax.get_xscale(), ax.xaxis.get_inverted(), len(ax.figure.axes)) == ("log", True, 2)
    both = plot.tolerance_curve({"a": CURVE, "b": CURVE})
    assert [text.get_text() for text in both.get_legend().get_texts()][:3] == ["a", "b", "forward NFE"]
    forward_only = hbnode.diagnostics.NFEToleranceCurve([1e-2], [8], [0], [0.0], [0.0], REFERENCE)
    assert len(forward_only.plot().get_lines()) == 1


def test_the_spectrum_shows_where_damping_brings_the_eigenvalues_from():
    """Of a spring: ±i without damping, -γ/2 ± i sqrt(1 - γ²/4) with it."""
    paths = data_of(plot.spectrum(spectrum(spring(), torch.ones(1, 1))))
    root = np.sqrt(1 - 0.2**2 / 4)
    upper_first = sorted(paths[:2], key=lambda line: -line[1][-1])  # LAPACK gives a pair in any order
    for line, end in zip(upper_first, (root, -root), strict=True):
        np.testing.assert_allclose(line[:, 0], [0, np.sign(end)], atol=1e-6)
        np.testing.assert_allclose(line[:, -1], [-0.1, end], atol=1e-6)
    np.testing.assert_allclose(sorted(paths[4][1]), [-root, root], rtol=1e-6)
    node = plot.spectrum(hbnode.ODEBlock(hbnode.NODE(lambda h: -h)), torch.ones(1, 2))
    np.testing.assert_allclose(data_of(node)[0], [[-1.0, -1.0], [0.0, 0.0]], rtol=1e-12)


H, FIRST_ORDER = torch.zeros(5, 3, 2), hbnode.ODEBlock(hbnode.NODE(lambda h: -h))
REFUSED = [
    (lambda: plot.trajectories(H, range(4)), ValueError, r"\(4,\). Fix: trajectories\(block\(x, t\), t\)"),
    (lambda: plot.trajectories(H, samples=[True, False]), IndexError, r"samples is a mask of shape \(2,\), .* Fix: a"),
    (lambda: plot.trajectories(torch.zeros(2, 40, 30)), ValueError, "40 samples of 30 features are more than 1000"),
    (lambda: plot.phase_portrait(H, features=1), ValueError, r"features must be two of h, got \[1\]"),
    (lambda: plot.phase_portrait(FIRST_ORDER, torch.ones(3, 1)), ValueError, "needs two features, got 1. Fix: traj"),
    (lambda: plot.vector_field(nn.Linear(2, 2)), ValueError, r"for a network, vector_field\(hbnode.NODE\(net\)\)"),
    (lambda: plot.vector_field(FIRST_ORDER, at=H[0, 0], features=(0, 3)), ValueError, "state of more than 2 features"),
    (lambda: plot.steps(spring()), TypeError, "needs an input x, got None. Fix: pass x after the block"),
    (lambda: plot.trajectories(H, ax=plt.subplots(1, 2)[1]), TypeError, "ax must be matplotlib Axes, got ndarray. Fix"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_cannot_be_drawn(call, error, message):
    with pytest.raises(error, match=message):
        call()
