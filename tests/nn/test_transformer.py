"""Transformer layers, connections over depth, and the model that streams."""

import copy
import functools
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import hbnode
from hbnode.nn import MomentumTransformer, MomentumTransformerDecoderLayer, MomentumTransformerLayer, transformer
from hbnode.nn.transformer import ATTENTIONS, draw, next_positions, sinusoids
from tests.pretend_device import pretended_device

E, H, F = 16, 4, 24
CONNECTIONS = ["residual", "momentum", "momentum_state", "adaptive", "heavy_ball", "nesterov"]


def layers(count=3, dtype=torch.float64, **options):
    torch.manual_seed(1)
    options = {"dropout": 0.0, "batch_first": True, "dtype": dtype} | options
    return [MomentumTransformerLayer(E, H, F, **options) for _ in range(count)]


def inputs(length=7, batch=2):
    return torch.randn(batch, length, E, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def close(a, b, tol=1e-11):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def run(stack, x, mask=None):
    depth = None
    for layer in stack:
        x, depth = layer(x, depth, mask)
    return x


def model(attention="momentum", vocabulary=9, **options):
    torch.manual_seed(2)
    options = {"num_layers": 3, "dim_feedforward": F, "dropout": 0.0, "dtype": torch.float64} | options
    return MomentumTransformer(vocabulary, E, H, attention=attention, **options)


def tokens(length=9, batch=3):
    return torch.randint(9, (batch, length), generator=torch.Generator().manual_seed(4))


# Connections, against their equations written out


def plain(stack, x, norm_first, connection):
    """The stack with each connection's equation written out."""
    previous = earlier = None
    v = torch.zeros_like(x)
    for layer in stack:

        def attend(h, layer=layer):
            h = layer.norm1(h) if norm_first else h
            return layer.self_attn(h, h, h)[0]

        def feed(h, layer=layer):
            h = layer.norm2(h) if norm_first else h
            return layer.linear2(torch.relu(layer.linear1(h)))

        here, join = x, layer.connection
        if connection == "nesterov":
            mu = join.look_ahead_size
            g = attend(x + mu * v)
        else:
            g = attend(x)
        if connection in ("momentum", "adaptive"):
            bracket = torch.zeros_like(x) if previous is None else x - previous
            if connection == "momentum":
                beta = 0.9
            elif earlier is None:
                beta = 0.0
            else:
                ratio = (g - earlier).norm(dim=-1, keepdim=True) / earlier.norm(dim=-1, keepdim=True)
                beta = torch.clamp((1 - ratio.sqrt()) ** 2, 0, 1 - 1e-3)
            x = x + g + beta * bracket
        elif connection == "momentum_state":
            v = 0.9 * v + g
            x = x + v
        elif connection in ("heavy_ball", "nesterov"):
            v = join.momentum[0] * v + join.step_size[0] * g
            x = x + v
        else:
            x = x + g
        previous, earlier = here, g
        x = x if norm_first else layer.norm1(x)
        if connection in ("heavy_ball", "nesterov"):
            v = join.momentum[1] * v + join.step_size[1] * feed(x + mu * v if connection == "nesterov" else x)
            x = x + v
        else:
            x = x + feed(x)
        x = x if norm_first else layer.norm2(x)
    return x


@pytest.mark.parametrize(("connection", "norm_first"), list(itertools.product(CONNECTIONS, [False, True])))
def test_connections_are_their_equations(connection, norm_first):
    stack = layers(connection=connection, norm_first=norm_first)
    for layer in stack:
        for p in layer.connection.parameters():
            p.data.add_(0.3 * torch.randn_like(p))
    parameters = [p for layer in stack for p in layer.parameters()]
    x = inputs().requires_grad_()
    output, wanted = run(stack, x), plain(stack, x, norm_first, connection)
    close(output, wanted)
    used = [x, *parameters]
    for a, b in zip(
        torch.autograd.grad(output.square().sum(), used, allow_unused=True),
        torch.autograd.grad(wanted.square().sum(), used, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        close(torch.zeros_like(b) if a is None else a, b, 1e-9)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [transformer.HeavyBallConnection, transformer.NesterovConnection])
def test_a_stream_without_momentum_is_the_residual(kind, norm_first):
    def make():
        return kind(momentum=0.0, step_size=1.0)

    stack, residual = layers(connection=make, norm_first=norm_first), layers(norm_first=norm_first)
    close(run(stack, inputs()), run(residual, inputs()), 1e-12)


def test_state_form_equals_the_paper_without_blocks_and_norms():
    """x_{l+1} = x_l + g_l + β (x_l - x_{l-1}) and v = β v + g, x + v are one iteration."""
    first, second = transformer.MomentumConnection(0.7), transformer.MomentumStateConnection(0.7)
    x = y = inputs()
    a = b = transformer.DepthState()
    for step in range(5):
        x, a = first.attention(x, torch.sin(x + step), a)
        y, b = second.attention(y, torch.sin(y + step), b)
    close(x, y)


def test_adaptive_momentum_by_hand():
    """|g - g'| / |g'| of 0, 1/4, 1, 4, 9 and of 0 / 0."""
    connection = transformer.AdaptiveConnection()
    previous = torch.tensor([[2.0, 0.0]] * 5 + [[0.0, 0.0]], dtype=torch.float64)
    change = torch.tensor([0.0, 0.5, 2.0, 8.0, 18.0, 0.0], dtype=torch.float64)
    update = previous + torch.stack((torch.zeros(6, dtype=torch.float64), change), 1)
    update.requires_grad_()
    beta = connection.momentum(update, previous)
    close(beta[:, 0], torch.tensor([0.999, 0.25, 0.0, 0.999, 0.999, 0.999], dtype=torch.float64), 1e-5)
    beta.sum().backward()
    assert update.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adaptive_momentum_after_an_update_of_zero(dtype):
    """The ratio of norms overflows; and of two equal updates it is 0, whose root has no slope."""
    connection = transformer.AdaptiveConnection()
    previous, update = torch.zeros(2, 8, dtype=dtype), torch.full((2, 8), 3.0, dtype=dtype)
    previous[1] = update[1]
    both = [x.requires_grad_() for x in (previous, update)]
    beta = connection.momentum(update, previous)
    assert beta.dtype == dtype
    close(beta[:, 0].float(), torch.tensor([0.999, 0.999]), 1e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(beta.sum(), both))


def test_adaptive_momentum_is_causal():
    stack, x = layers(connection="adaptive"), inputs()
    changed = x.clone()
    changed[:, 4:] = 3.0
    close(run(stack, x)[:, :4], run(stack, changed)[:, :4])


# Layers against torch's


@pytest.mark.parametrize(("norm_first", "causal"), list(itertools.product([True, False], repeat=2)))
def test_softmax_layer_is_torchs(norm_first, causal):
    torch.manual_seed(0)
    stock = nn.TransformerEncoderLayer(E, H, F, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    (ours,) = layers(1, attention="softmax", attention_options={"rotary": False}, norm_first=norm_first, causal=causal)
    ours.load_state_dict(stock.state_dict())
    x = inputs()
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64) if causal else None
    close(ours(x)[0], stock(x, mask))


@pytest.mark.parametrize("norm_first", [False, True])
def test_softmax_decoder_layer_is_torchs(norm_first):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    stock = nn.TransformerDecoderLayer(E, H, F, **options)
    ours = MomentumTransformerDecoderLayer(E, H, F, attention="softmax", attention_options={"rotary": False}, **options)
    ours.load_state_dict(stock.state_dict())
    x, memory = inputs(), inputs(5)
    ignored = torch.zeros(2, 5, dtype=torch.bool)
    ignored[1, 3:] = True
    order = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    wanted = stock(x, memory, order, memory_key_padding_mask=ignored)
    close(ours(x, memory, memory_key_padding_mask=ignored)[0], wanted)


@pytest.mark.parametrize("attention", ["momentum", "linear", "softmax"])
@pytest.mark.parametrize("connection", CONNECTIONS)
def test_decoder_layers(attention, connection):
    torch.manual_seed(0)
    options = {"attention": attention, "connection": connection, "causal": False}
    layer = MomentumTransformerDecoderLayer(E, H, F, 0.0, batch_first=True, dtype=torch.float64, **options)
    x, memory = inputs().requires_grad_(), inputs(5)
    y, depth = layer(x, memory)
    y, _ = layer(y, memory, depth)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert x.grad.isfinite().all()


def test_causal_memories_need_another_cross_attention():
    with pytest.raises(ValueError, match=r"reads its input in order.*Fix: causal=True, or 'momentum'"):
        MomentumTransformerDecoderLayer(E, H, F, attention="heavy_ball")
    layer = MomentumTransformerDecoderLayer(E, H, F, attention="heavy_ball", cross_attention="softmax")
    assert layer(torch.zeros(3, 2, E), torch.zeros(5, 2, E))[0].shape == (3, 2, E)


def test_ignored_tokens_leave_no_trace():
    for attention in ATTENTIONS:
        stack, x = layers(attention=attention, connection="adaptive"), inputs()
        ignored = torch.zeros(2, 7, dtype=torch.bool)
        ignored[0, 5:] = True
        changed = x.masked_fill(ignored[..., None], 9.0)
        close(run(stack, changed, ignored)[~ignored], run(stack, x, ignored)[~ignored])
        close(run(stack, x[:1, :5]), run(stack, x, ignored)[:1, :5])


# The model


@pytest.mark.parametrize(
    ("attention", "connection"),
    [*itertools.product(ATTENTIONS, ["adaptive", "nesterov"]), *((("momentum"), x) for x in CONNECTIONS)],
)
def test_streaming_equals_the_whole(attention, connection):
    net, x = model(attention, connection=connection), tokens()
    whole = net(x)
    head, state = net.prefill(x[:, :4])
    parts = [head]
    for i in range(4, 8):
        y, state = net.step(x[:, i], state)
        parts.append(y[:, None])
    tail, state = net.prefill(x[:, 8:], state)
    close(torch.cat([*parts, tail], 1), whole)
    assert state.position.tolist() == [9, 9, 9]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_detached_state_ends_backpropagation(attention):
    net, x = model(attention, None), torch.randn(3, 9, E, dtype=torch.float64, requires_grad=True)
    _, state = net.prefill(x[:, :4])
    whole, _ = net.prefill(x[:, 4:], state)
    y, _ = net.prefill(x[:, 4:], state.detach())
    close(y, whole)
    (slope,) = torch.autograd.grad(y.square().sum(), x)
    assert slope[:, :4].abs().max() == 0 < slope[:, 4:].abs().min()
    (slope,) = torch.autograd.grad(whole.square().sum(), x)
    assert slope[:, :4].abs().min() > 0


@pytest.mark.parametrize(("attention", "positions"), [("softmax", "rotary"), ("softmax", None), ("heavy_ball", None)])
def test_positions_stream(attention, positions):
    net, x = model(attention, positions=positions), tokens()
    head, state = net.prefill(x[:, :5])
    tail, _ = net.prefill(x[:, 5:], state)
    close(torch.cat((head, tail), 1), net(x))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_prompts_of_different_lengths(attention):
    """Padding on either side changes nothing, and generation goes on from the last token that counts."""
    net, x = model(attention), tokens(6)
    lengths = [6, 4, 1]
    for side in ("left", "right"):
        padded, ignored = torch.zeros_like(x), torch.ones(3, 6, dtype=torch.bool)
        for row, length in enumerate(lengths):
            place = slice(6 - length, 6) if side == "left" else slice(0, length)
            padded[row, place], ignored[row, place] = x[row, :length], False
        _, state = net.prefill(padded, key_padding_mask=ignored)
        assert state.position.tolist() == lengths
        y, _ = net.step(torch.tensor([1, 2, 3]), state)
        for row, length in enumerate(lengths):
            alone = torch.cat((x[row, :length], torch.tensor([row + 1])))[None]
            close(y[row], net(alone)[0, -1])
        generated = net.generate(padded, 5, key_padding_mask=ignored, temperature=0)
        for row, length in enumerate(lengths):
            alone = net.generate(x[row : row + 1, :length], 5, temperature=0)
            assert torch.equal(generated[row, 6:], alone[0, length:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_greedy_generation_is_that_of_the_whole(attention):
    net, x = model(attention), tokens(4)
    generated = net.generate(x, 6, temperature=0)
    wanted = x
    for _ in range(6):
        wanted = torch.cat((wanted, net(wanted)[:, -1:].argmax(-1)), 1)
    assert torch.equal(generated, wanted)


def test_generation_draws_from_the_outputs():
    net = model(num_layers=1)
    prompt = torch.zeros(4000, 1, dtype=torch.int64)
    p = net(prompt[:1])[0, -1].softmax(-1)
    drawn = net.generate(prompt, 1, generator=torch.Generator().manual_seed(0))[:, 1]
    counts = torch.bincount(drawn, minlength=9) / 4000
    assert ((counts - p).abs() < 5 * (p * (1 - p) / 4000).sqrt()).all()
    best = set(p.topk(2).indices.tolist())
    assert set(net.generate(prompt, 1, top_k=2)[:, 1].tolist()) == best
    cold = net.generate(prompt, 1, temperature=0.5, generator=torch.Generator().manual_seed(0))[:, 1]
    wanted = (net(prompt[:1])[0, -1] / 0.5).softmax(-1)
    assert ((torch.bincount(cold, minlength=9) / 4000 - wanted).abs() < 0.05).all()


def test_generation_leaves_the_model_as_it_was():
    net = model(dropout=0.5)
    net.layers[0].eval()
    x = tokens(3)
    a, b = (net.generate(x, 5, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)  # no dropout
    assert net.training
    assert net.layers[1].training
    assert not net.layers[0].training
    assert torch.equal(net.generate(x, 0), x)


def test_top_k_among_equals():
    """No more than k, as narrow numbers often tie."""
    output = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0]]).expand(500, -1)
    for k in (1, 2, 3, 9):
        assert len(set(draw(output, 1.0, k, torch.Generator().manual_seed(0)).tolist())) == min(k, 5)


def test_layers_and_readouts_that_were_wrapped():
    for attention in ("momentum", "softmax", "heavy_ball"):
        net, x = model(attention), tokens()
        expected = net.generate(x, 3, temperature=0)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            close(other(x), net(x))
        net.layers[0] = torch.compile(net.layers[0], backend="eager")
        net.readout = nn.Sequential(net.readout)
        net.layers[1].self_attn.out_proj = nn.Sequential(net.layers[1].self_attn.out_proj)
        assert net.generate(x, 3, temperature=0).equal(expected)


def test_generation_of_vectors():
    net = model(vocabulary=None, output_size=2)
    prompt = inputs(2)
    generated = net.generate(prompt, 3, sample=lambda output: output[:, :1].expand(-1, E))
    assert generated.shape == (2, 5, E)
    close(generated[:, 2, 0], net(prompt)[:, -1, 0])
    with pytest.raises(ValueError, match=r"Fix: sample="):
        net.generate(prompt, 3)


def test_a_model_learns_to_repeat():
    torch.manual_seed(0)
    net = MomentumTransformer(6, 32, 4, 2, 64, dropout=0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x = torch.arange(12).remainder(3).repeat(8, 1)
    for _ in range(60):
        loss = nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert net.generate(x[:1, :4], 5, temperature=0).tolist() == [[0, 1, 2] * 3]


def test_sinusoids():
    table = sinusoids(torch.tensor([0, 3]), 5)
    rate = 10_000 ** (-2 / 5)
    wanted = [math.sin(3), math.cos(3), math.sin(3 * rate), math.cos(3 * rate), math.sin(3 * rate**2)]
    close(table, torch.tensor([[0, 1, 0, 1, 0], wanted]), 1e-6)
    places, after = next_positions(torch.tensor([0, 5]), 3, torch.tensor([[False, True, False], [True, False, False]]))
    assert places.tolist() == [[0, 1, 1], [5, 5, 6]]
    assert after.tolist() == [2, 7]


def test_masks_of_numbers_and_wrong_masks():
    net, x = model(), tokens()
    ignored = torch.zeros(3, 9, dtype=torch.bool)
    ignored[1, 5:] = True
    close(net(x, torch.zeros(3, 9).masked_fill(ignored, -torch.inf))[~ignored], net(x, ignored)[~ignored])
    with pytest.raises(ValueError, match=r"key_padding_mask must be bool, .batch, keys. = \(3, 9\)"):
        net(x, ignored[:, :5])
    with pytest.raises(TypeError, match=r"key_padding_mask must be a tensor"):
        net(x, [[False] * 9] * 3)


def test_one_module_does_not_serve_all_layers():
    with pytest.raises(TypeError, match=r"got a MomentumAttention. Fix: attention=MomentumAttention"):
        MomentumTransformerLayer(E, H, F, attention=hbnode.nn.MomentumAttention(E, H))
    with pytest.raises(TypeError, match=r"got a MomentumConnection. Fix: connection=MomentumConnection"):
        MomentumTransformerLayer(E, H, F, connection=transformer.MomentumConnection())
    MomentumTransformerLayer(E, H, F, connection=transformer.MomentumConnection)
    with pytest.raises(ValueError, match=r"has momentum=0.0, which.*Fix: attention='momentum'"):
        MomentumTransformerLayer(E, H, F, attention="linear", attention_options={"momentum": 0.5})


def test_classes_in_the_place_of_names():
    """With the dropout and the positions that the names come with."""
    torch.manual_seed(0)
    for name, kind, options in (
        ("momentum", hbnode.nn.MomentumAttention, {}),
        ("linear", functools.partial(hbnode.nn.MomentumAttention, momentum=0.0), {}),
        ("heavy_ball", hbnode.nn.HeavyBallMemory, {}),
        ("softmax", hbnode.nn.SoftmaxAttention, {}),
        ("softmax", hbnode.nn.SoftmaxAttention, {"positions": "rotary"}),
        ("softmax", hbnode.nn.SoftmaxAttention, {"positions": None}),
    ):
        by_name, by_class = (MomentumTransformer(9, E, H, 1, F, attention=x, **options) for x in (name, kind))
        by_class.load_state_dict(by_name.state_dict())
        close(by_class.eval()(tokens()), by_name.eval()(tokens()), 0.0)
    with pytest.raises(ValueError, match=r"Fix: causal=True, or 'momentum'"):
        MomentumTransformerLayer(E, H, F, attention=hbnode.nn.HeavyBallMemory, causal=False)
    layer = MomentumTransformerDecoderLayer(E, H, F, attention=hbnode.nn.SoftmaxAttention)
    assert layer.self_attn.rotary
    assert not layer.multihead_attn.rotary
    with pytest.raises(ValueError, match=r"Fix: leave it out.*MomentumConnection\(0.5\)"):
        MomentumTransformerLayer(E, H, F, connection=transformer.MomentumConnection, connection_momentum=0.5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_vectors_of_nan_under_the_mask(norm_first):
    net, x = model(vocabulary=None, norm_first=norm_first), inputs(9, 3)
    ignored = torch.zeros(3, 9, dtype=torch.bool)
    ignored[1, 5:] = True
    expected = net(x, ignored)[~ignored]
    y = net(x.masked_fill(ignored.unsqueeze(-1), torch.nan), ignored)[~ignored]
    close(y, expected)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_wrong_arguments_are_refused():
    net = model()
    for error, message, call in (
        (
            TypeError,
            r"Fix: key_padding_mask=mask by name",
            lambda: layers(1)[0](inputs(), torch.zeros(2, 7, dtype=torch.bool)),
        ),
        (ValueError, r"Fix: torch.nn.functional.silu", lambda: layers(1, activation="silu")),
        (
            ValueError,
            r"attention must be one of.*Fix: attention='softmax'",
            lambda: MomentumTransformerLayer(E, H, F, attention="soft_max"),
        ),
        (
            ValueError,
            r"connection must be one of.*Fix: connection='nesterov'",
            lambda: MomentumTransformerLayer(E, H, F, connection="nestrov"),
        ),
        (
            ValueError,
            r"takes no connection_momentum",
            lambda: MomentumTransformerLayer(E, H, F, connection="adaptive", connection_momentum=0.5),
        ),
        (
            ValueError,
            r"momentum must be in \[0, 1\)",
            lambda: MomentumTransformerLayer(E, H, F, connection="momentum", connection_momentum=1.0),
        ),
        (ValueError, r"Fix: positions='sinusoidal'", lambda: MomentumTransformer(5, E, H, positions="rotary")),
        (ValueError, r"positions must be", lambda: MomentumTransformer(5, E, H, positions="learned")),
        (
            ValueError,
            r"Fix: causal=True, or 'momentum'",
            lambda: MomentumTransformer(5, E, H, attention="heavy_ball", causal=False),
        ),
        (ValueError, r"tokens must be whole numbers.*Fix: tokens\[None\]", lambda: net(tokens()[0])),
        (
            TypeError,
            r"tokens must be a tensor, got list. Fix: torch.tensor\(tokens\)",
            lambda: net.generate(tokens().tolist(), 3),
        ),
        (ValueError, r"inputs must be \(batch, length, d_model = 16\)", lambda: model(vocabulary=None)(tokens())),
        (
            ValueError,
            r"inputs must be \(batch, length, d_model = 16\)",
            lambda: model(vocabulary=None)(inputs()[..., :3]),
        ),
        (ValueError, r"Fix: begin with a start token", lambda: net.generate(tokens(0), 3)),
        (ValueError, r"top_k must be an integer >= 1, got 1.5", lambda: net.generate(tokens(), 3, top_k=1.5)),
        (ValueError, r"tokens must be whole numbers.*Fix: tokens\[None\]", lambda: net.generate(tokens()[0], 3)),
        (ValueError, r"step takes one token of each sequence, \(batch,\)", lambda: net.step(tokens())),
        (
            ValueError,
            r"TransformerState of 3 sequences, got of 2 sequences. Fix: init_state\(3\)",
            lambda: net.step(tokens()[:, 0], net.init_state(2)),
        ),
        (ValueError, r"got tuple", lambda: net.step(tokens()[:, 0], (None, None))),
        (
            ValueError,
            r"the state is of 1 layers, the model has 3",
            lambda: net.step(tokens()[:, 0], model(num_layers=1).init_state(3)),
        ),
        (TypeError, r"Fix: x, depth_state = layer\(x, depth_state\)", lambda: nn.Sequential(*layers(2))(inputs())),
        (ValueError, r"so it cannot take them one by one", lambda: model(causal=False).prefill(tokens())),
    ):
        with pytest.raises(error, match=message):
            call()
    for temperature in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"temperature must be a number >= 0"):
            net.generate(tokens(), 3, temperature=temperature)


@pytest.mark.parametrize("connection", ["adaptive", "nesterov"])
@pytest.mark.parametrize("attention", ["momentum", "heavy_ball", "softmax"])
def test_a_device_is_not_waited_for(attention, connection):
    with pretended_device() as device:
        net = device.move(model(attention, connection=connection, dtype=torch.float32))
        x, ignored = device.move(tokens(11)), torch.zeros(3, 11, dtype=torch.bool)
        ignored[0, 8:] = ignored[2, 1] = True
        ignored = device.move(ignored)
        before = device.synchronisations
        output = net(x, ignored)
        output.square().sum().backward()
        generated = net.generate(x, 3, temperature=0)
        assert device.synchronisations == before
        assert output.is_cuda
        assert generated.is_cuda
        assert all(p.grad.is_cuda for p in net.parameters() if p.grad is not None)
