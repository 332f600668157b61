"""Transformer layers, connections over depth, and the model that streams."""

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


def written_out(stack, x, norm_first, connection):
    """The stack with each connection's equation written out; β = 0 and γ = 1 are the residual x + g."""
    previous = earlier = None
    v = torch.zeros_like(x)
    normed = lambda norm, z, is_here: norm(z) if is_here else z
    for layer in stack:
        mu = layer.connection.look_ahead_size if connection == "nesterov" else 0.0
        beta, gamma = (0.9 if connection == "momentum_state" else 0.0, 0.0), (1.0, 1.0)
        if connection in ("heavy_ball", "nesterov"):
            beta, gamma = layer.connection.momentum, layer.connection.step_size
        here, g = x, layer.self_attn(normed(layer.norm1, x + mu * v, norm_first))[0]
        v = beta[0] * v + gamma[0] * g
        x = x + v
        if connection == "momentum" and previous is not None:
            x = x + 0.9 * (here - previous)
        if connection == "adaptive" and previous is not None:
            ratio = (g - earlier).norm(dim=-1, keepdim=True) / earlier.norm(dim=-1, keepdim=True)
            x = x + torch.clamp((1 - ratio.sqrt()) ** 2, 0, 1 - 1e-3) * (here - previous)
        previous, earlier = here, g
        x = normed(layer.norm1, x, not norm_first)
        h = layer.linear2(torch.relu(layer.linear1(normed(layer.norm2, x + mu * v, norm_first))))
        if connection == "momentum_state":  # whose velocity is that of the attention alone
            x = x + h
        else:
            v = beta[1] * v + gamma[1] * h
            x = x + v
        x = normed(layer.norm2, x, not norm_first)
    return x


@pytest.mark.sparse
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("connection", CONNECTIONS)
def test_connections_are_their_equations(connection, norm_first):
    stack = layers(connection=connection, norm_first=norm_first)
    for layer in stack:
        for p in layer.connection.parameters():
            p.data.add_(0.3 * torch.randn_like(p))
    x = inputs().requires_grad_()
    leaves = [x, *(p for layer in stack for p in layer.parameters())]
    output, wanted = run(stack, x), written_out(stack, x, norm_first, connection)
    close(output, wanted)
    both = (torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True) for y in (output, wanted))
    close(*both, 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float16, 1e-3)])
def test_adaptive_momentum(dtype, tolerance):
    """|g - g'| / |g'| of 0, 1/4, 1, 4, 9, 0 / 0 and 3 / 0, which overflows; its root has no slope at 0."""
    previous = torch.tensor([[2.0, 0.0]] * 5 + [[0.0, 0.0]] * 2, dtype=dtype, requires_grad=True)
    change = torch.tensor([0.0, 0.5, 2.0, 8.0, 18.0, 0.0, 3.0], dtype=dtype)
    update = (previous.detach() + torch.stack((torch.zeros_like(change), change), 1)).requires_grad_()
    beta = transformer.AdaptiveConnection().momentum(update, previous)
    close(beta[:, 0], torch.tensor([0.999, 0.25, 0.0, *[0.999] * 4], dtype=dtype), tolerance)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(beta.sum(), (update, previous)))


# Layers against torch's


@pytest.mark.parametrize("norm_first", [False, True])
def test_softmax_decoder_layer_is_torchs(norm_first):
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    theirs = nn.TransformerDecoderLayer(E, H, F, **options)
    ours = MomentumTransformerDecoderLayer(E, H, F, attention="softmax", attention_options={"rotary": False}, **options)
    x, memory = inputs(), inputs(5)
    ignored = torch.zeros(2, 5, dtype=torch.bool)
    ignored[1, 3:] = True
    order = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    for part in ours.parameters():  # else all norms are one
        part.data.add_(0.1 * torch.randn_like(part))
    theirs.load_state_dict(ours.state_dict())
    wanted = theirs(x, memory, order, memory_key_padding_mask=ignored)
    close(ours(x, memory, memory_key_padding_mask=ignored)[0], wanted)


# The model


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        *((attention, {"connection": "adaptive"}) for attention in ATTENTIONS),
        *(("momentum", {"connection": connection}) for connection in CONNECTIONS),
        ("softmax", {"positions": "rotary"}),
        ("softmax", {"positions": None}),
    ],
)
def test_streaming_equals_the_whole(attention, options):
    net, x = model(attention, **options), tokens()
    head, state = net.prefill(x[:, :4])
    parts = [head]
    for i in range(4, 8):
        y, state = net.step(x[:, i], state)
        parts.append(y[:, None])
    tail, state = net.prefill(x[:, 8:], state)
    close(torch.cat([*parts, tail], 1), net(x))
    assert state.position.tolist() == [9, 9, 9]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["momentum", "softmax", "heavy_ball"])
def test_prompts_of_different_lengths(attention, side):
    """Padding on either side changes nothing, and generation goes on from the last token that counts."""
    net, x, lengths = model(attention), tokens(6), [6, 4, 1]
    places, counts = torch.arange(6), torch.tensor(lengths)[:, None]
    ignored = places < 6 - counts if side == "left" else places >= counts
    padded = torch.zeros_like(x).masked_scatter(~ignored, torch.cat([x[i, :n] for i, n in enumerate(lengths)]))
    output, state = net.prefill(padded, key_padding_mask=ignored)
    close(net(padded, ignored)[~ignored], output[~ignored])
    assert state.position.tolist() == lengths
    generated = net.generate(padded, 5, key_padding_mask=ignored, temperature=0)
    for row, length in enumerate(lengths):
        alone = x[row : row + 1, :length]
        close(output[row : row + 1, ~ignored[row]], net(alone))
        for _ in range(5):
            alone = torch.cat((alone, net(alone)[:, -1:].argmax(-1)), 1)
        assert torch.equal(generated[row, 6:], alone[0, length:])


@pytest.mark.parametrize(("options", "divisor"), [({}, 1.0), ({"temperature": 0.5}, 0.5)])
def test_generation_draws_from_the_outputs(options, divisor):
    net, prompt = model(num_layers=1), torch.zeros(4000, 1, dtype=torch.int64)
    p = (net(prompt[:1])[0, -1] / divisor).softmax(-1)
    drawn = net.generate(prompt, 1, generator=torch.Generator().manual_seed(0), **options)[:, 1]
    counts = torch.bincount(drawn, minlength=9) / 4000
    assert ((counts - p).abs() < 5 * (p * (1 - p) / 4000).sqrt()).all()
    best = set(p.topk(2).indices.tolist())
    assert set(net.generate(prompt, 1, top_k=2, **options)[:, 1].tolist()) == best


def test_generation_leaves_the_model_as_it_was():
    net, x = model(dropout=0.5), tokens(3)
    net.layers[0].eval()
    a, b = (net.generate(x, 5, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)  # no dropout
    assert [net.training, *(layer.training for layer in net.layers)] == [True, False, True, True]
    assert torch.equal(net.generate(x, 0), x)


def test_draws_near_temperature_zero():
    for dtype, temperature in itertools.product((torch.bfloat16, torch.float64), (1e-6, 1e-45, 1e-320)):
        output = 1000 * torch.randn(50, 9, dtype=dtype)
        output[:, 4] = output.amax() + 10
        assert (draw(output, temperature, 3, None) == 4).all()


def test_sinusoids():
    table = sinusoids(torch.tensor([0, 3]), 5)
    rate = 10_000 ** (-2 / 5)
    wanted = [math.sin(3), math.cos(3), math.sin(3 * rate), math.cos(3 * rate), math.sin(3 * rate**2)]
    close(table, torch.tensor([[0, 1, 0, 1, 0], wanted]), 1e-6)
    places, after = next_positions(torch.tensor([0, 5]), 3, torch.tensor([[False, True, False], [True, False, False]]))
    assert places.tolist() == [[0, 1, 1], [5, 5, 6]]
    assert after.tolist() == [2, 7]


def test_a_class_in_the_place_of_a_name():
    """With the dropout and the positions that the name comes with."""
    kind = functools.partial(hbnode.nn.SoftmaxAttention, bias=True)
    by_name, by_class = (MomentumTransformer(9, E, H, 1, F, attention=x).eval() for x in ("softmax", kind))
    by_class.load_state_dict(by_name.state_dict())
    close(by_class(tokens()), by_name(tokens()), 0.0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_what_is_under_the_mask_may_have_any_value(norm_first):
    net, x = model(vocabulary=None, norm_first=norm_first), inputs(9, 3)
    ignored = torch.zeros(3, 9, dtype=torch.bool)
    ignored[1, 5:] = True
    expected = net(x, ignored)[~ignored]
    y = net(x.masked_fill(ignored.unsqueeze(-1), torch.nan), ignored)[~ignored]
    close(y, expected)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    net, x = model(), tokens().int()
    close(net(x.masked_fill(ignored, -100), ignored)[~ignored], net(x.long(), ignored)[~ignored])
    assert net.generate(x, 2).dtype == torch.int32


def test_what_is_refused():
    rotary, whole = (functools.partial(hbnode.nn.SoftmaxAttention, **x) for x in ({"rotary": True}, {"causal": False}))
    decoder = functools.partial(MomentumTransformerDecoderLayer, E, H, F)
    net, x, mask = model(), tokens(), torch.zeros(2, 7, dtype=torch.bool)
    broken = model()
    nn.init.constant_(broken.readout.bias, math.nan)
    for message, call in (
        ("must have causal=True", lambda: layers(attention=whole)),
        ("attention must be one of.*Fix: attention='softmax'", lambda: layers(attention="soft_max")),
        ("Fix: attention=MomentumAttention", lambda: layers(attention=hbnode.nn.MomentumAttention(E, H))),
        (
            "must have causal=False",
            lambda: layers(attention=lambda *a, **_: hbnode.nn.HeavyBallMemory(*a), causal=False),
        ),
        ("without rotary.*Fix: cross_attention='soft", lambda: decoder(cross_attention=rotary)),
        ("got MomentumAttention without them. Fix: positions='sinusoidal'", lambda: model(positions="rotary")),
        ("Fix: pass a mask by name, key_padding_mask=mask", lambda: layers(1)[0](inputs(), mask)),
        (r"Fix: x, depth_state = layer\(x, depth_state\)", lambda: nn.Sequential(*layers(2))(inputs())),
        (r"tokens must be .batch, length., got shape \(9,\).*Fix: tokens\[None\]", lambda: net(x[0])),
        (r"int64 or int32, got torch.float32. Fix: tokens.long\(\)", lambda: net(x.float())),
        (r"< num_embeddings = 9, got 9 to 9. Fix: num_embeddings=10", lambda: net(0 * x + 9)),
        (r"key_padding_mask must be bool, .batch, keys. = \(3, 9\)", lambda: net(x, mask)),
        ("generate needs finite outputs to sample from", lambda: broken.generate(x, 2)),
    ):
        with pytest.raises((ValueError, TypeError, IndexError), match=message):
            call()


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("momentum", {"connection": "adaptive"}),
        ("heavy_ball", {"connection": "nesterov"}),
        ("softmax", {"connection": "momentum_state", "positions": "rotary"}),
    ],
)
def test_a_device_is_not_waited_for(attention, options):
    with pretended_device() as device:
        net = device.move(model(attention, dtype=torch.float32, **options))
        x, ignored = device.move(tokens(11)), device.move(torch.rand(3, 11) < 0.3)
        before = device.synchronisations
        output = net(x, ignored)
        output.square().sum().backward()
        generated = net.generate(x, 3, temperature=0)
        assert device.synchronisations == before
        assert all(x.is_cuda for x in (output, generated))
        assert all(p.grad.is_cuda for p in net.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["momentum", "softmax", "heavy_ball"])
def test_layers_and_readouts_that_were_wrapped(attention):
    net, x = pickle.loads(pickle.dumps(model(attention))), tokens()
    expected = model(attention).generate(x, 3, temperature=0)
    net.layers[0] = torch.compile(net.layers[0], backend="eager")
    net.readout = nn.Sequential(net.readout)
    net.layers[1].self_attn.out_proj = nn.Sequential(net.layers[1].self_attn.out_proj)
    assert net.generate(x, 3, temperature=0).equal(expected)
