"""The attention modules: torch's interface, streaming, masks, and what users do with modules."""

import copy
import importlib
import io
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from hbnode.nn.attention import HeavyBallMemory, KeyValueCache, MomentumAttention, SoftmaxAttention, rotate
from tests.models import slow
from tests.pretend_device import pretended_device

E, H = 16, 4

KINDS = {
    "momentum": (MomentumAttention, {"momentum": 0.9}),
    "per_head": (MomentumAttention, {"momentum": [0.0, 0.5, 0.9, 0.99], "step_size": 0.5}),
    "learned": (MomentumAttention, {"learn_momentum": True, "learn_step_size": True}),
    "heavy_ball": (HeavyBallMemory, {}),
    "plain_delta": (HeavyBallMemory, {"delta": "plain", "decay": False}),
    "gated_delta": (HeavyBallMemory, {"momentum": False}),
    "gated_linear": (HeavyBallMemory, {"momentum": False, "delta": False}),
    "rotary": (SoftmaxAttention, {}),
    "softmax": (SoftmaxAttention, {"rotary": False}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
MODULES = ["momentum", "heavy_ball", "rotary"]
each_module = pytest.mark.parametrize("kind", MODULES)


def make(kind, batch_first=True, dtype=torch.float64, **options):
    torch.manual_seed(3)
    make_module, own = KINDS[kind]
    module = make_module(E, H, batch_first=batch_first, dtype=dtype, **(own | options))
    for p in module.parameters():  # biases begin at zero
        p.data.add_(0.1 * torch.randn_like(p))
    return module


def inputs(length=11, batch=3, dtype=torch.float64):
    return torch.randn(batch, length, E, dtype=dtype, generator=torch.Generator().manual_seed(5))


def close(a, b, tol=1e-11):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def make_mask():
    """Padding at the end of the first sequence, at the start of the second, and holes in the third."""
    ignored = torch.zeros(3, 11, dtype=torch.bool)
    ignored[0, 8:] = ignored[1, :3] = True
    ignored[2, [0, 4, 5, 10]] = True
    return ignored


def tensors(state):
    """The tensors of a state, of whatever kind."""
    if isinstance(state, KeyValueCache):
        return [state.keys, state.values]
    return [x for x in state if x is not None]


@every_kind
def test_streaming_equals_the_whole(kind):
    """In values and gradients."""
    module, x = make(kind), inputs().requires_grad_()
    whole, weights = module(x, x, x)
    assert weights is None
    for state in (None, module.init_state(3)):
        parts = []
        for piece in x[:, :10].split((1, 4, 1, 4), 1):
            y, state = module.prefill(piece, state)
            parts.append(y)
        y, state = module.step(x[:, 10], state)
        streamed = torch.cat((*parts, y[:, None]), 1)
        close(streamed, whole)
        leaves = [x, *module.parameters()]
        both = (torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (streamed, whole))
        close(*both, 1e-9)
    close(module.step(x[:, 0])[0], whole[:, 0])


@every_kind
def test_ignored_tokens_leave_no_trace(kind):
    """In outputs, states and gradients, whether they come at once or in parts."""
    module, ignored = make(kind), make_mask()
    x = inputs().masked_fill(ignored[..., None], torch.nan).requires_grad_()
    output, _ = module(x, x, x, key_padding_mask=ignored)
    grads = torch.autograd.grad(output[~ignored].square().sum(), [x, *module.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    head, state = module.prefill(x[:, :5], None, ignored[:, :5])
    tail, state = module.prefill(x[:, 5:], state, ignored[:, 5:])
    close(torch.cat((head, tail), 1)[~ignored], output[~ignored])
    assert all(part.isfinite().all() for part in tensors(state))
    following = inputs(1)[:, 0]
    goes_on, _ = module.step(following, state)
    for row in range(3):
        wanted, state = module.prefill(x[row, ~ignored[row]][None])
        close(output[row, ~ignored[row]][None], wanted)
        close(goes_on[row : row + 1], module.step(following[row : row + 1], state)[0])


@each_module
def test_a_state_serves_two_continuations(kind):
    module, x = make(kind), inputs()
    with torch.no_grad():
        whole, _ = module(x, x, x)
        _, state = module.prefill(x[:, :6])
        _, other = module.prefill(torch.ones_like(x), state)
        before = [part.clone() for part in (*tensors(state), *tensors(other))]
        again, _ = module.prefill(x[:, 6:], state)
    close(again, whole[:, 6:])
    assert all(map(torch.equal, (*tensors(state), *tensors(other)), before))


@each_module
def test_layouts_agree(kind):
    module, other, x, mask = make(kind), make(kind, batch_first=False), inputs(), make_mask()
    output, _ = module(x, x, x, mask)
    swapped = x.transpose(0, 1)
    close(other(swapped, swapped, swapped, mask)[0].transpose(0, 1), output)
    close(other(swapped, None, swapped + 1)[0].transpose(0, 1), module(x, None, x + 1)[0])
    close(other.prefill(swapped)[0].transpose(0, 1), module(x)[0])
    for each in (module, other):
        close(each(x[0], x[0], x[0], mask[0])[0], output[0])


@pytest.mark.sparse
@each_module
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_numbers(kind, dtype):
    module, x = make(kind, dtype=dtype), inputs(dtype=dtype)
    wanted = copy.deepcopy(module).double()(x.double())[0]
    tolerance = (0.03 if dtype == torch.bfloat16 else 1e-5) * wanted.abs().max()
    y, state = module.step(x[:, 0])
    y, state = module.step(x[:, 1], state)
    for output, truth in ((module(x)[0], wanted), (y, wanted[:, 1])):
        assert output.dtype == dtype
        assert (output - truth).abs().max() < tolerance


@pytest.mark.slow
@each_module
def test_compiled_for_any_length(kind):
    """In one graph, with gradients."""
    torch._dynamo.reset()
    module, counted = (
        make(kind),
        importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend("aot_eager"),
    )
    compiled = torch.compile(module, backend=counted, fullgraph=True)
    for length in (70, 90):
        x = torch.randn(2, length, E, dtype=torch.float64).requires_grad_()
        mask = torch.rand(2, length) < 0.3
        for z in (x, mask):
            torch._dynamo.mark_dynamic(z, 1)
        out, wanted = (f(x, x, x, mask)[0] for f in (compiled, module))
        close(out, wanted)
        close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, wanted)))
    assert counted.frame_count == 1


X = inputs()


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "need_weights must be False", (X, X, X), {"need_weights": True}),
        (ValueError, r"must be bool, .batch, keys. = \(3, 11\)", (X, X, X, torch.zeros(11, 3).bool()), {}),
        (ValueError, "mask == 0 if ones in the mask are attended to", (X, X, X, torch.ones(3, 11).long()), {}),
        (ValueError, "must hold only 0 and -inf, got other values", (X, X, X, torch.ones(3, 11)), {}),
        (ValueError, "Fix: batch_first=True if the batch comes first", (X, X[:2], X[:2]), {}),
        (ValueError, "causal=False to attend to another sequence", (X, X[:, :4], X[:, :4]), {}),
        (TypeError, r"query is torch.float32.*Fix: query.to\(torch.float64\), or", (X.float(),), {}),
    ],
)
def test_wrong_calls_are_refused(error, message, arguments, options):
    with pytest.raises(error, match=message):
        make("heavy_ball")(*arguments, **options)


@pytest.mark.parametrize(
    ("module", "error", "message", "options"),
    [
        (MomentumAttention, ValueError, "dropout must be 0, got 0.1", {"dropout": 0.1}),
        (SoftmaxAttention, ValueError, "Fix: an even head size", {"embed_dim": 12}),
        (MomentumAttention, ValueError, "embed_dim=20", {"embed_dim": 17}),
        (MomentumAttention, ValueError, r"momentum must be in \[0, 1\)", {"momentum": 1.0}),
        (MomentumAttention, TypeError, "or 4 numbers, got 'high'", {"momentum": "high"}),
        (MomentumAttention, ValueError, "must start above 0", {"momentum": 0.0, "learn_momentum": True}),
        (HeavyBallMemory, ValueError, "delta must be .* got 'plian'", {"delta": "plian"}),
        (HeavyBallMemory, TypeError, "momentum must be True or False, got 0.9", {"momentum": 0.9}),
    ],
)
def test_wrong_options_are_refused(module, error, message, options):
    with pytest.raises(error, match=message):
        module(**{"embed_dim": E, "num_heads": H} | options)


def test_wrong_streams_and_packings_are_refused():
    momentum, softmax, memory, x = make("momentum"), make("rotary"), make("heavy_ball"), inputs()
    one, ends, packed = inputs(batch=1), torch.tensor(ENDS), r"initial_state.s must be \(4, 4, 4, 4\)"
    for error, message, call in (
        (ValueError, "Fix: prefill for several", lambda: momentum.step(x)),
        (ValueError, "Fix: causal=True", lambda: make("momentum", causal=False).prefill(x)),
        (ValueError, "got 6, 16. Fix: leave kdim and vdim out", lambda: make("momentum", kdim=6).prefill(x)),
        (ValueError, r"Fix: x\[None\]", lambda: momentum.prefill(x[0])),
        (TypeError, "must be a MomentumAttentionState", lambda: momentum.step(x[:, 0], softmax.init_state(3))),
        (
            TypeError,
            r"on cpu, got .*meta.* Fix: state",
            lambda: momentum.step(x[:, 0], momentum.init_state(3).to("meta")),
        ),
        (ValueError, "must have 3 sequences.*got 2, 4 and 4", lambda: softmax.step(x[:, 0], softmax.init_state(2))),
        (ValueError, r"batch must be 1, got 3. Fix: x.flatten\(0, 1\)\[None\]", lambda: memory(x, cu_seqlens=ends)),
        (ValueError, "must rise from 0 to the length 11", lambda: memory(one, cu_seqlens=ends[:-1])),
        (ValueError, packed, lambda: memory.prefill(one, memory.init_state(1), cu_seqlens=ends)),
        (ValueError, "MomentumAttention does not take packed", lambda: momentum(one, cu_seqlens=ends)),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("kind", [*MODULES, *slow(*(kind for kind in KINDS if kind not in MODULES))])
def test_a_device_is_not_waited_for(kind):
    with pretended_device() as device:
        module = device.move(make(kind, dtype=torch.float32))
        x, ignored = device.move(torch.randn(3, 11, E)).requires_grad_(), device.move(make_mask())
        before = device.synchronisations
        for mask in (None, ignored):
            output, _ = module(x, x, x, mask)
            output.square().sum().backward()
            with torch.no_grad():
                y, state = module.prefill(x[:, :6], None, None if mask is None else mask[:, :6])
                y, state = module.step(x[:, 6], state)
                module.prefill(x[:, 7:], state, None if mask is None else mask[:, 7:])
        assert device.synchronisations == before
        assert all(tensor.is_cuda for tensor in (output, y, x.grad, *(p.grad for p in module.parameters())))


# Against torch


@pytest.mark.parametrize("training", [True, False])
@each_module
def test_inside_torchs_encoder(kind, training):
    """It says is_causal=False, and in evaluation it would call its own fused softmax attention with our weights."""
    module, mask = make(kind), make_mask()
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = module
    layer.train(training)
    x = inputs()
    with torch.no_grad():
        output = layer(x, src_key_padding_mask=mask)
        close(layer(x[:, :7], src_key_padding_mask=mask[:, :7]), output[:, :7])  # blind to the future
        x = layer.norm1(x + module(x, x, x, mask)[0])
        x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
    close(output, x)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [None, make_mask()], ids=["all", "masked"])
def test_softmax_is_torchs(causal, mask):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    ours = SoftmaxAttention(E, H, batch_first=True, rotary=False, causal=causal, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = inputs()
    order = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.bool) if causal else None
    wanted, _ = theirs(x, x, x, key_padding_mask=mask, attn_mask=order, need_weights=False)
    has_key = wanted.isfinite()  # where all keys are ignored torch's output is NaN
    close(ours(x, x, x, mask)[0][has_key], wanted[has_key])


def test_other_sizes_of_keys_and_values():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, kdim=6, vdim=10, dtype=torch.float64)
    ours = SoftmaxAttention(E, H, kdim=6, vdim=10, rotary=False, causal=False, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    q, k, v = (torch.randn(n, 2, d, dtype=torch.float64) for n, d in ((5, E), (9, 6), (9, 10)))
    close(ours(q, k, v)[0], theirs(q, k, v, need_weights=False)[0])
    linear = MomentumAttention(E, H, kdim=6, vdim=10, causal=False, dtype=torch.float64)
    assert linear(q, k, v)[0].shape == q.shape


def test_rotary_scores_depend_on_distances_alone():
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    near, far = (rotate(q, places) @ rotate(k, places).mT for places in (torch.arange(5), 1000 + torch.arange(5)))
    close(near, far)
    point = torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]], dtype=torch.float64)
    angles = torch.tensor([3.0, 0.03], dtype=torch.float64)
    close(rotate(point, torch.tensor([3]))[0, 0, 0], torch.cat((angles.cos(), angles.sin())), 1e-15)
    assert rotate(point.bfloat16(), torch.tensor([3])).dtype == torch.bfloat16


def test_cache_grows():
    module = make("rotary")
    x = inputs(200)
    with torch.no_grad():
        whole, _ = module(x, x, x)
        state, buffers = None, set()
        for i in range(200):
            y, state = module.step(x[:, i], state)
            buffers.add(state._keys.data_ptr())
            close(y, whole[:, i])
    assert len(state) == 200
    assert len(buffers) <= 4


def test_a_cache_of_inference_mode_goes_on_outside():
    module, x = make("rotary"), inputs()
    with torch.inference_mode():
        _, state = module.prefill(x[:, :10])
    with torch.no_grad():
        y, _ = module.step(x[:, 10], state)
    close(y, module(x, x, x)[0][:, 10])


# What is our own


def test_learned_and_fixed_momentum():
    """Both survive bfloat16, and a fixed number is never rounded."""
    module = make("learned")
    module(inputs())[0].sum().backward()
    assert module.momentum_logit.grad.abs().min() > 0
    assert module.log_step_size.grad.abs().min() > 0
    start = MomentumAttention(E, H, momentum=0.999, step_size=2.0, learn_momentum=True, learn_step_size=True)
    close(start.step_size, torch.full((H,), 2.0), 1e-6)
    assert (start.bfloat16().momentum < 0.9995).all()
    fixed, other = MomentumAttention(E, H, momentum=0.9).bfloat16(), MomentumAttention(E, H, momentum=0.5)
    other.load_state_dict(fixed.float().state_dict())
    assert fixed.momentum == other.momentum == 0.9


def test_a_call_can_be_causal_but_not_undo_it():
    causal, both, x = make("momentum"), make("momentum", causal=False), inputs()
    close((causal(x, is_causal=False)[0], both(x, is_causal=True)[0]), (causal(x)[0],) * 2)
    assert not torch.allclose(both(x)[0], causal(x)[0])


def test_the_plain_delta_rule_warns_with_decay():
    with pytest.warns(UserWarning, match=r"delta='plain', momentum and decay is not bounded.*Fix: delta='decayed'"):
        HeavyBallMemory(E, H, delta="plain")


def test_gates_are_in_the_safe_region():
    """η <= 1 - μ and s <= 1 - μ, so that s η <= 3 (1 - μ)^2 too, whatever the input is."""
    module = HeavyBallMemory(E, H, dtype=torch.float64)
    gates = module._gates(100 * inputs())
    rest = 1 - gates["log_momentum"].exp()
    assert (gates["step"] <= rest + 1e-12).all()
    assert (gates["write"] <= rest + 1e-12).all()


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.sparse
@each_module
@pytest.mark.parametrize("again", [saved_and_loaded, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_states_are_saved_copied_and_loaded(kind, again):
    module, x = make(kind), inputs()
    with torch.no_grad():
        _, state = module.prefill(x[:, :5], None, make_mask()[:, :5])
        _, state = module.step(x[:, 5], state)
        found = again(state)
        assert type(found) is type(state)
        (y, _), (wanted, _) = module.step(x[:, 6], found), module.step(x[:, 6], state)
    assert torch.equal(y, wanted)


ENDS = [0, 3, 3, 4, 11]  # sequences of 3, 0, 1 and 7 tokens
MEMORIES = [kind for kind in KINDS if KINDS[kind][0] is HeavyBallMemory]


@pytest.mark.sparse
@pytest.mark.parametrize("mask", [None, make_mask()[2:]], ids=["all", "masked"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_packed_sequences(kind, mask):
    """As calls for each: outputs, states, their continuation, and gradients."""
    module, x, ends = make(kind), inputs(batch=1).requires_grad_(), torch.tensor(ENDS)
    found, wanted = [], []
    for start, end in pairwise(ENDS):
        part = None if mask is None else mask[:, start:end]
        wanted.append(module(x[:, start:end], key_padding_mask=part)[0])
        found.append(module.prefill(x[:, start:end], None, part)[1])
    wanted, states = torch.cat(wanted, 1), [torch.cat(parts) for parts in zip(*map(tensors, found), strict=True)]
    output = module(x, key_padding_mask=mask, cu_seqlens=ends)[0]
    again, state = module.prefill(x, None, mask, cu_seqlens=ends)
    close((output, again, tensors(state)), (wanted, wanted, states))
    next_token = torch.randn(4, E, dtype=torch.float64)
    close(module.step(next_token, state)[0], module.step(next_token, type(state)(*states))[0])
    over = [x, *module.parameters()]
    close(*(torch.autograd.grad((y * x.detach()).sum(), over) for y in (output, wanted)))


@each_module
def test_a_state_of_inference_mode_goes_on_in_training(kind):
    module, x = make(kind), inputs()
    with torch.inference_mode():
        _, state = module.prefill(x[:, :5])
    for again in (module.step(x[:, 5], state)[0], module.prefill(x[:, 5:], state)[0]):
        again.sum().backward()
    close(module.prefill(x[:, 5:], state)[0], module(x)[0][:, 5:])


@pytest.mark.slow
@each_module
def test_exported(kind):
    """For any batch; one of as many sequences as heads too."""
    module, x, mask = make(kind), inputs(), make_mask()
    batch = torch.export.Dim("batch", max=64)
    shapes = {name: {0: batch} for name in ("query", "key", "value", "key_padding_mask")}
    program = torch.export.export(module, (x, x, x), {"key_padding_mask": mask}, dynamic_shapes=shapes).module()
    for count in (3, H):
        x, mask = inputs(batch=count), torch.zeros(count, 11, dtype=torch.bool)
        mask[1, 6:] = True
        close(program(x, x, x, key_padding_mask=mask)[0], module(x, x, x, mask)[0])


@pytest.mark.slow
def test_a_cache_exports():
    module, x = make("rotary").eval(), inputs()

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x, state):
            return self.attention.step(x, state)

    state = module.prefill(x[:, :10])[1].detach()
    y, after = torch.export.export(Step(), (x[:, 10], state)).module()(x[:, 10], state)
    assert len(after) == 11
    close(y, module(x, x, x)[0][:, 10])


@pytest.mark.slow
def test_packed_sequences_in_a_graph():
    torch._dynamo.reset()
    module = make("heavy_ball")
    compiled = torch.compile(module, backend="eager", dynamic=True, fullgraph=True)
    for length, ends in ((11, ENDS), (70, [0, 5, 70])):
        x = torch.randn(1, length, E, dtype=torch.float64).requires_grad_()
        out, wanted = (f(x, x, x, cu_seqlens=torch.tensor(ends))[0] for f in (compiled, module))
        close(out, wanted)
        close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, wanted)))
