"""The private functions of torch that hbnode calls mean what they are used for; what users of torch.nn try."""

import copy
import itertools
import pickle
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hbnode
from hbnode import _torch
from tests.models import slow


def test_transforms_are_noticed():
    seen = []

    def function(x):
        seen.append((not _torch.may_look(), _torch.plain(x).shape))
        return x.sum()

    x = torch.zeros(3, 2)
    function(x)
    torch.func.vmap(function, in_dims=1)(x)
    torch.func.grad(function)(x)
    assert seen == [(False, (3, 2)), (True, (2, 3)), (True, (3, 2))]


def test_forward_mode_is_noticed():
    assert not _torch.is_transformed()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_transformed()


def test_gradients_that_stand_for_many_are_noticed():
    seen = []
    x = torch.zeros(3, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda g: seen.append(_torch.is_batched(g)))
    torch.autograd.grad(y, x, torch.eye(3), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def test_backward_passes_have_numbers():
    seen = [_torch.backward_pass()]
    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: seen.append(_torch.backward_pass()))
        (2 * x).backward()
    assert seen[0] == -1
    assert seen[1] != seen[2]
    assert -1 not in seen[1:]


def test_later_nodes_have_larger_numbers():
    x = torch.ones(1, requires_grad=True)
    earlier, later = x + 1, x + 2
    assert _torch.sequence_number(earlier.grad_fn) < _torch.sequence_number(later.grad_fn)


def test_passes_that_keep_the_graph_are_noticed():
    seen = []
    y = 2 * torch.ones(1, requires_grad=True)
    y.register_hook(lambda g: seen.append(_torch.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


SCRIPT = """
import resource, sys, torch
from hbnode._torch import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory(torch.device("cpu"))
for turn in range(4):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**18) for _ in range(24)]  # a mebibyte each
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_blocks_that_come_and_go_are_not_taken_from_the_system_again(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True)
        faults[how] = int(done.stdout)
    assert faults["keep"] < 0.3 * faults["leave"]  # near 0, but for pages that the system moves


X, T = torch.linspace(-1, 1, 24).sin().reshape(3, 4, 2), torch.tensor([0.0, 0.3, 0.5, 1.2])
LAYERS = {  # a layer, and what it takes of a batch of samples (batch, 4, 2)
    "block": (lambda: hbnode.HeavyBallODEBlock(hbnode.nn.MLP(2, [3], 2, activation=nn.Tanh), steps=4), "x[:, 0]"),
    "flow": (
        lambda: hbnode.distributions.HeavyBallFlow(nn.Linear(2, 2), 2, gradient="direct", posterior=nn.Linear(2, 4)),
        "x[:, 0]",
    ),
    **{
        f"ODERNN, {options}": (lambda options=options: hbnode.ODERNN(2, 4, steps=2, **options), "x, T")
        for options in (
            {"field": "node"}, {"field": "anode"}, {"field": "sonode"}, {"field": "ghbnode"}, {"num_layers": 2},
            {"bidirectional": True, "cell": "rnn", "residual": True}, {"missing": "decay", "elapsed_features": True},
            {"initial_state": "zeros", "cell": "rnn"}, {"time_unit": 2.0, "per_sample": False},
        )
    },
    "LatentODE": (lambda: hbnode.nn.LatentODE(2, 3, 4, steps=2), "x, T"),
    "LatentSDE": (lambda: hbnode.nn.LatentSDE(2, 3, 4, dt=0.5), "x, T"),
    "Oscillators": (lambda: hbnode.nn.Oscillators(2, 3, 2), "x, T"),
    "selective": (lambda: hbnode.nn.Oscillators(2, 3, 2, selective=True), "x, T"),
    "OscillatorStack": (lambda: hbnode.nn.OscillatorStack(2, 4, 3), "x, T"),
    "MomentumLSTM": (lambda: hbnode.nn.MomentumLSTM(2, 4, batch_first=True), "x"),
    "MomentumGRU": (lambda: hbnode.nn.MomentumGRU(2, 4, batch_first=True, rule="adam", num_layers=2), "x"),
    "DTRIV": (lambda: hbnode.nn.DTRIV(2, 4, batch_first=True), "x"),
    "MomentumRNNCell": (lambda: hbnode.nn.MomentumRNNCell(2, 4), "x[:, 0]"),
    "MomentumAttention": (lambda: hbnode.nn.MomentumAttention(2, 1, batch_first=True), "x, x, x"),
    "HeavyBallMemory": (lambda: hbnode.nn.HeavyBallMemory(2, 1, batch_first=True), "x, x, x"),
    "MomentumTransformerLayer": (lambda: hbnode.nn.MomentumTransformerLayer(2, 1, 4, dropout=0.0), "x"),
}  # fmt: skip


def call(layer, x, arguments):
    """The output of a layer of LAYERS, or of a call of one, with the noise of a seed."""
    torch.manual_seed(1)
    return layer(*eval(f"({arguments},)", {"x": x, "T": T}))


def value_of(layer, x, arguments):
    """Its main output."""
    out = call(layer, x, arguments)
    return out.value if hasattr(out, "value") else tree_leaves(out)[0]


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_frozen_layers_give_the_same(name):
    make, arguments = LAYERS[name]
    layer = make()
    with torch.device("meta"):
        empty = make()
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    expected = value_of(layer, X, arguments)
    for copied in (empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert value_of(copied, X, arguments).equal(expected)
    found = value_of(layer.requires_grad_(False), X, arguments)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_and_autocast(name):
    """Of which momentum and the states of oscillators and of solves take no part."""
    make, arguments = LAYERS[name]
    layer, keeps = make(), name.startswith(("block", "flow", "ODERNN", "selective", "DTRIV")) or name == "Oscillators"
    expected = value_of(layer, X, arguments)
    for dtype, is_auto in itertools.product((torch.bfloat16, torch.float16), (True, False)):
        own = copy.deepcopy(layer) if is_auto else copy.deepcopy(layer).to(dtype)
        with torch.autocast("cpu", dtype, enabled=is_auto):
            out = call(own, X if is_auto else X.to(dtype), arguments)
        y = out.value if hasattr(out, "value") else tree_leaves(out)[0]
        y.float().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in own.parameters())
        if not name.startswith("Latent"):  # whose draws depend on the dtype
            torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)
        if keeps or not is_auto:
            assert y.dtype == (torch.float32 if is_auto else dtype)
        if isinstance(out, tuple) and getattr(out[1], "v", None) is not None:
            assert out[1].v.dtype == out[1].to(dtype).v.dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith(("ODERNN", "Latent"))])
def test_empty_batches(name):  # as those of torch.nn; layers over irregular series need a sample
    make, arguments = LAYERS[name]
    layer, x = make(), X[:0].clone().requires_grad_()
    if name in ("Oscillators", "selective", "OscillatorStack"):
        with pytest.raises(ValueError, match=r"at least one sample, got \(0, 4, 2\)"):
            value_of(layer, x, arguments)
    else:
        value_of(layer, x, arguments).sum().backward()
        assert x.grad.shape == x.shape
        assert not any(p.grad is not None and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("name", ["Oscillators", *slow(*(name for name in LAYERS if name != "Oscillators"))])
@pytest.mark.filterwarnings("default")  # torch's own
def test_compiled_and_exported_layers_give_the_same(name):
    make, arguments = LAYERS[name]
    layer = make().double()
    compiled = torch.compile(layer, backend="aot_eager")
    values, gradients = zip(
        *(
            (y.detach(), torch.autograd.grad(y.sin().sum(), list(layer.parameters()), allow_unused=True))
            for y in (value_of(each, X.double(), arguments) for each in (layer, compiled))
        ),
        strict=True,
    )
    torch.testing.assert_close(values[1], values[0])
    for one, other in zip(*gradients, strict=True):
        assert one is other or torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9) is None
    if not name.startswith("Latent"):  # whose call is the bound that is trained
        given = eval(f"({arguments},)", {"x": X.double(), "T": T})
        exported = torch.export.export(layer.eval(), given).module()
        torch.testing.assert_close(value_of(exported, X.double(), arguments), value_of(layer, X.double(), arguments))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_each_sample_under_vmap_are_those_of_a_loop(name):
    torch.manual_seed(0)
    make, arguments = LAYERS[name]
    layer = make().double()

    def loss(parameters, x):
        apply = lambda *given: torch.func.functional_call(layer, parameters, given)
        return value_of(apply, x[None], arguments).sin().sum()

    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="same")(parameters, X.double())
    jacobians = torch.func.vmap(torch.func.jacrev(loss, 1), (None, 0), randomness="same")(parameters, X.double())
    for i, x in enumerate(X.double().requires_grad_()):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        expected = torch.autograd.grad(loss(leaves, x), [x, *leaves.values()], allow_unused=True)
        for key, one in zip(["x", *leaves], expected, strict=True):
            own = jacobians[i] if key == "x" else found[key][i]
            torch.testing.assert_close(own, torch.zeros_like(own) if one is None else one, msg=key)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda a: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), max_damping=a), "x[:, 0]"),
        (lambda a: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), damping=[a, 2 * a], learn_damping=False), "x[:, 0]"),
        (lambda a: hbnode.ODEBlock(hbnode.GHBNODE(nn.Linear(2, 2), xi=a, learn_xi=False)), "x[:, 0]"),
        (lambda a: hbnode.ODERNN(2, 4, time_unit=a), "x, T"),
        (lambda a: hbnode.nn.LatentODE(2, 3, 4, time_unit=a, steps=2), "x, T"),
        (lambda a: hbnode.nn.MomentumAttention(2, 1, momentum=a, step_size=a), "x, x, x"),
        (lambda a: hbnode.distributions.HeavyBallFlow(nn.Linear(2, 2), 2, max_damping=a), "x[:, 0]"),
    ],
    ids=["block", "constants", "xi", "ODERNN", "LatentODE", "attention", "flow"],
)
def test_functional_call_takes_a_state_dict(make, arguments):
    """Constants too, of which the gradients pass the end of the call."""

    def attempt(layer):
        value = value_of(layer, X, arguments)
        return value, torch.autograd.grad(value.sin().sum(), list(other.parameters()), allow_unused=True)

    one, other = make(0.3), make(0.6)
    state = other.state_dict(keep_vars=True)
    found = attempt(lambda *given: torch.func.functional_call(one, state, given))
    torch.testing.assert_close(found, attempt(other))


def test_the_stance_of_torch_is_restored_whatever_the_order_in_which_threads_end():
    import torch._dynamo

    first, second = _torch.in_eager_mode(), _torch.in_eager_mode()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as a thread that began first and ends first
    second.__exit__(None, None, None)
    graphs = []
    torch.compile(torch.sin, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(torch.ones(2))
    assert graphs
