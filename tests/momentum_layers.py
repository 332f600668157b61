"""The momentum recurrent layers as the parametrised tests need them, each with its plain reference."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from hbnode.nn import recurrent, rules
from tests.reference_recurrent import Twin

RULES = {
    "momentum": rules.Momentum(momentum=0.7, step_size=0.6),
    "nag": rules.NAG(step_size=0.3),
    "restart": rules.ScheduledRestart(restart=5, step_size=0.6),
    "adam": rules.Adam(momentum=0.5, step_size=0.4, beta=0.8, eps=1e-4),
    "rmsprop": rules.RMSProp(step_size=0.4, beta=0.8, eps=1e-4),
    "adaptive": rules.AdaptiveMomentum(step_size=0.5, delta=0.1),
}
CELLS = {"rnn": "RNN", "lstm": "LSTM", "gru": "GRU", "dtriv": "DTRIV"}
TORCH = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
GRID = [(cell, rule) for cell in CELLS for rule in ("momentum", "adam")]
PAIRS = [("rnn", "adaptive"), ("lstm", "momentum"), ("gru", "adam"), ("dtriv", "nag")]
every_layer = pytest.mark.parametrize(("cell", "rule"), GRID)
some_layers = pytest.mark.parametrize(("cell", "rule"), PAIRS)


def kind(cell, rule="momentum", suffix=""):
    """The class of a layer, or with suffix "Cell" of a cell; "" is no rule."""
    return getattr(recurrent, ("Momentum" if rule else "") + CELLS[cell] + suffix)


def make_pair(cell, rule, inputs=2, hidden=3, layers=1, **options):
    """A layer in float64, off its initial weights, and its reference."""
    twin = Twin(cell, rule, dataclasses.asdict(RULES[rule]) if rule else {})
    options |= {"rule": RULES[rule]} if rule else {}
    layer = kind(cell, rule)(inputs, hidden, layers, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer, twin


def make_input(time=7, batch=3, inputs=2):
    """A batch of sequences, time first."""
    return torch.randn(time, batch, inputs, dtype=torch.float64)


def make_state(layer, x):
    """A random initial state of the entries that the layer uses, and the same for its reference."""
    _, used = layer(x)
    entries = {k: torch.rand_like(v) + 0.1 if v.is_floating_point() else v for k, v in used.as_dict().items()}
    if "t" in entries:
        entries["t"] = torch.arange(3, 3 + len(entries["t"]))
    for name, value in entries.items():
        if name != "t":
            value.requires_grad_()
    return recurrent.RecurrentState(**entries), entries


def close(found, expected, tolerance):
    """Compare two tensors, or each pair of two lists, to a tolerance of the largest entry, or of one."""
    if not isinstance(expected, torch.Tensor):
        for one, another in zip(found, expected, strict=True):
            close(one, another, tolerance)
        return
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


def gradients(output, state, leaves):
    """Of a loss in which every output and every floating entry of the last state has its own weight."""
    parts = [output, *(value for name, value in sorted(state.items()) if name != "t")]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parts]
    loss = sum((p * w).sum() for p, w in zip(parts, weights, strict=True))
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def assert_equal_to_twin(layer, twin, x, state=None, lengths=None):
    """Values and all gradients of a layer against its reference's; ``state`` is a pair from make_state."""
    given, entries = state or (None, {})
    x = x.detach().requires_grad_()
    leaves = [x, *layer.parameters(), *(value for name, value in entries.items() if name != "t")]
    fed = x
    if lengths is not None:
        fed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    expected_output, wanted = twin(layer, x, entries, lengths)
    wanted_gradients = None
    for _ in every_way():
        output, last = _padded(layer(fed, given), lengths, len(x))
        expected = {name: wanted[name] for name in last}
        with torch.no_grad():
            without_gradient = _padded(layer(fed, given), lengths, len(x))
        for found, end in ((output, last), without_gradient):
            close(found, expected_output, 1e-10)
            for name, value in end.items():
                close(value.double(), expected[name].double(), 1e-10)
        wanted_gradients = wanted_gradients or gradients(expected_output, expected, leaves)
        close(gradients(output, last, leaves), wanted_gradients, 1e-9)


def every_way():
    """The ways that a layer picks by its size, one after another: torch's layer and matrices, and loops over chunks."""
    yield
    with (
        mock.patch.object(recurrent, "SMALL_PRODUCT", 0),
        mock.patch.object(recurrent, "CHUNK_SIZE", 100),
        mock.patch("hbnode.nn._scan.LOOP_WIDTH", 0),
    ):
        yield


def _padded(found, lengths, total):
    output, last = found
    if lengths is not None:
        output, _ = nn.utils.rnn.pad_packed_sequence(output, total_length=total)
    return output, last.as_dict()
