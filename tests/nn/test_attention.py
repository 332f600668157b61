"""The attention modules: torch's interface, streaming, masks, and what users do with modules."""

import copy
import importlib
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from hbnode.nn.attention import HeavyBallMemory, KeyValueCache, MomentumAttention, SoftmaxAttention, rotate

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
        for piece in x[:, :10].split((1, 4, 0, 1, 4), 1):
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
def test_layouts_agree(kind):
    module, other, x, mask = make(kind), make(kind, batch_first=False), inputs(), make_mask()
    output, _ = module(x, x, x, mask)
    swapped = x.transpose(0, 1)
    close(other(swapped, swapped, swapped, mask)[0].transpose(0, 1), output)
    close(other(swapped, None, swapped + 1)[0].transpose(0, 1), module(x, None, x + 1)[0])
    close(other.prefill(swapped)[0].transpose(0, 1), module(x)[0])
    for each in (module, other):
        close(each(x[0], x[0], x[0], mask[0])[0], output[0])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packed"), [*((kind, False) for kind in MODULES), ("heavy_ball", True)])
def test_compiled_for_any_length(kind, packed):
    """In one graph, with gradients."""
    torch._dynamo.reset()
    counted = importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend("aot_eager")
    module = make(kind)
    compiled = torch.compile(module, backend=counted, fullgraph=True)
    for length in (70, 90):
        x, mask = torch.randn(1, length, E, dtype=torch.float64).requires_grad_(), torch.rand(1, length) < 0.3
        for z in (x, mask):
            torch._dynamo.mark_dynamic(z, 1)
        options = {"cu_seqlens": torch.tensor([0, 3, 3, length])} if packed else {}
        out, wanted = (f(x, x, x, mask, **options)[0] for f in (compiled, module))
        close(out, wanted)
        close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, wanted)))
    assert counted.frame_count == 1


def test_what_is_refused():
    x, ones, ends = inputs(), torch.ones(3, 11), torch.tensor(ENDS)
    momentum, softmax, memory = (make(kind) for kind in ("momentum", "rotary", "heavy_ball"))
    for message, call in (
        ("need_weights must be False", lambda: memory(x, need_weights=True)),
        ("mask == 0 if ones in the mask are attended to", lambda: memory(x, x, x, ones.long())),
        ("must hold only 0 and -inf, got other values", lambda: memory(x, x, x, ones)),
        ("causal=False to attend to another sequence", lambda: memory(x, x[:, :4], x[:, :4])),
        (r"momentum must be in \[0, 1\)", lambda: make("momentum", momentum=1.0)),
        ("Fix: causal=True", lambda: make("momentum", causal=False).prefill(x)),
        (r"Fix: x\[None\]", lambda: momentum.prefill(x[0])),
        ("must have 3 sequences.*got 2, 4 and 4", lambda: softmax.step(x[:, 0], softmax.init_state(2))),
        (r"batch must be 1, got 3. Fix: x.flatten\(0, 1\)\[None\]", lambda: memory(x, cu_seqlens=ends)),
        ("must rise from 0 to the length 11", lambda: memory(x[:1], cu_seqlens=ends[:-1])),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


# Against torch


@pytest.mark.parametrize("training", [True, False])
@each_module
def test_inside_torchs_encoder(kind, training):
    """It says is_causal=False, and in evaluation it would call its own fused softmax attention with our weights."""
    module, x, mask = make(kind), inputs(), make_mask()
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True, dtype=torch.float64).train(training)
    layer.self_attn = module
    with torch.no_grad():
        between = layer.norm1(x + module(x, x, x, mask)[0])
        expected = layer.norm2(between + layer.linear2(torch.relu(layer.linear1(between))))
        close(layer(x, src_key_padding_mask=mask), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [None, make_mask()], ids=["all", "masked"])
def test_softmax_is_torchs(causal, mask):
    options = {"kdim": 6, "vdim": 10, "batch_first": True, "dtype": torch.float64}
    theirs, ours = (
        nn.MultiheadAttention(E, H, **options),
        SoftmaxAttention(E, H, rotary=False, causal=causal, **options),
    )
    ours.load_state_dict(theirs.state_dict())
    x = inputs(11 if causal else 5), inputs()[..., :6], inputs()[..., 6:]
    order = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.bool) if causal else None
    wanted, _ = theirs(*x, key_padding_mask=mask, attn_mask=order, need_weights=False)
    has_key = wanted.isfinite()  # where all keys are ignored torch's output is NaN
    close(ours(*x, mask)[0][has_key], wanted[has_key])


def test_rotary_scores_depend_on_distances_alone():
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    near, far = (rotate(q, places) @ rotate(k, places).mT for places in (torch.arange(5), 1000 + torch.arange(5)))
    close(near, far)
    point = torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]], dtype=torch.float64)
    angles = torch.tensor([3.0, 0.03], dtype=torch.float64)
    close(rotate(point, torch.tensor([3]))[0, 0, 0], torch.cat((angles.cos(), angles.sin())), 1e-15)


def test_cache_grows():
    module, x = make("rotary"), inputs(200)
    with torch.no_grad():
        outputs, state, buffers = [], None, set()
        for token in x.unbind(1):
            y, state = module.step(token, state)
            outputs.append(y)
            buffers.add(state._keys.data_ptr())
        close(torch.stack(outputs, 1), module(x)[0])
    assert len(state) == 200
    assert len(buffers) <= 4


# What is our own


def test_learned_and_fixed_momentum():
    """Both survive bfloat16, and a fixed number is never rounded."""
    learned = MomentumAttention(E, H, momentum=0.999, step_size=2.0, learn_momentum=True, learn_step_size=True)
    close(learned.step_size, torch.full((H,), 2.0), 1e-6)
    assert (learned.bfloat16().momentum < 0.9995).all()
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


ENDS = [0, 3, 3, 4, 11]  # sequences of 3, 0, 1 and 7 tokens
MEMORIES = [kind for kind in KINDS if KINDS[kind][0] is HeavyBallMemory]


@pytest.mark.sparse
@pytest.mark.parametrize("mask", [None, make_mask()[2:]], ids=["all", "masked"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_packed_sequences(kind, mask):
    """As calls for each."""
    module, x, ends = make(kind), inputs(batch=1), torch.tensor(ENDS)
    cuts = [slice(*pair) for pair in pairwise(ENDS)]
    each = [module.prefill(x[:, cut], None, None if mask is None else mask[:, cut]) for cut in cuts]
    outputs, states = zip(*each, strict=True)
    output, state = module.prefill(x, None, mask, cu_seqlens=ends)
    close(output, torch.cat(outputs, 1))
    close(tensors(state), [torch.cat(parts) for parts in zip(*map(tensors, states), strict=True)])
    close(module(x, key_padding_mask=mask, cu_seqlens=ends)[0], output)


@each_module
def test_a_state_serves_several_continuations(kind, tmp_path):
    """Made in inference mode, it goes on in training; copies give the same."""
    module, x, none = make(kind), inputs(), torch.zeros(3, 6, dtype=torch.bool)
    whole, _ = module(x)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            _, state = module.prefill(x[:, :6], None, none)
        with torch.no_grad():
            _, other = module.prefill(torch.ones_like(x), state)
            before = [part.clone() for part in (*tensors(state), *tensors(other))]
            close(module.prefill(x[:, 6:], state)[0], whole[:, 6:])
        assert all(map(torch.equal, (*tensors(state), *tensors(other)), before))
        module.prefill(x[:, 6:], state)[0].sum().backward()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    for again in (loaded, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        close(module.step(x[:, 6], again)[0], whole[:, 6])


@pytest.mark.slow
@each_module
def test_exported(kind):
    """For any batch and length; one of as many sequences as heads too."""
    module, x, mask = make(kind), inputs(20), torch.zeros(3, 20, dtype=torch.bool)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2, max=1000)}
    shapes = dict.fromkeys(("query", "key", "value", "key_padding_mask"), sizes)
    program = torch.export.export(module, (x, x, x), {"key_padding_mask": mask}, dynamic_shapes=shapes).module()
    for count, length in ((3, 2), (H, 150)):
        x, mask = inputs(length, count), torch.zeros(count, length, dtype=torch.bool)
        mask[1, length // 2 :] = True
        close(program(x, x, x, key_padding_mask=mask)[0], module(x, x, x, mask)[0])


class Step(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, state):
        return self.attention.step(x, state)


@pytest.mark.slow
def test_a_cache_exports():
    module, x = make("rotary").eval(), inputs()
    given = x[:, 10], module.prefill(x[:, :10])[1].detach()
    y, after = torch.export.export(Step(module), given).module()(*given)
    assert len(after) == 11
    close(y, module(x)[0][:, 10])
