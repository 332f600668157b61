"""Random calls of every public entry point: each returns, or raises an error that says what is wrong.

A call is a source that can be pasted. Its arguments come from the signature of what is called: by name from ``VALUES``,
from a ``Literal``, or True and False. An odd call has one or two arguments from ``ODD``. A call passes if it returns
(finite numbers for ordinary arguments, with a gradient), or raises an error that has a "Fix:", names the odd argument,
or shows its type, value or shape. ``FUZZ_MINUTES=25 python -m tests.test_fuzz`` prints each kind of crash with the
shortest call that shows it.
"""

import collections
import inspect
import itertools
import math
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hbnode
import hbnode.estimators
import hbnode.features

LIMIT = 60  # seconds of processor time for a call
MINUTES = float(os.environ.get("FUZZ_MINUTES", "1"))


def table(text):
    """Read lines of ``names: value | value`` into a dict of lists of sources; ``//`` is a new line."""
    pairs = [line.strip().split(": ", 1) for line in re.split("\n| // ", text.replace("\\\n", "")) if ": " in line]
    return {name: values.split(" | ") for names, values in pairs for name in names.split()}


ODD = table(r"""
odd: None | -1 | 0 | 1.5 | nan | inf | True | 'x' | [] | {} | [1.0, 'a'] | 1e-300 | 1e300 | object() | 1j | 1 << 70 | \
'2020-01-01' | lambda *a: None | nn.Linear(3, 3) | [[0.0, 1.0], [2.0]] | [3, 2, 1] | [0.0, 0.0] | range(3) | float | \
torch.float64 | np.float64(0.5) | np.ones((2, 3)) | np.array(['a', 'b']) | np.datetime64('2020-01-01') | \
pd.Series([1.0, 2.0]) | torch.tensor(1.0) | torch.tensor([nan]) | torch.empty(0) | torch.empty(2, 0, 2) | \
torch.arange(3) | torch.zeros(2, 3, 2) | torch.randn(2, 3, 4, 5) | torch.full((2, 3, 2), 1e30) | \
torch.ones(2, 3, dtype=torch.bool) | torch.ones(2, 3, dtype=torch.complex64) | torch.ones(2, 3, dtype=torch.float16) | \
torch.ones(3, dtype=torch.bfloat16) | torch.ones(2, 3).to_sparse() | torch.ones(2, 3, device='meta')
""")["odd"]

VALUES = table(r"""
field: hbnode.NODE(net()) | hbnode.HBNODE(net()) | hbnode.GHBNODE(net()) | hbnode.NesterovNODE(net()) | \
hbnode.AdamNODE(net()) | hbnode.SONODE(lambda h, v: -h - v) | hbnode.ANODE(hbnode.nn.MLP(3, [3], 3), 1) | \
hbnode.PortHamiltonian(lambda h: h.square().sum(-1).square()) // func: net()
block module: hbnode.HeavyBallODEBlock(net()) | hbnode.ODEBlock(hbnode.NODE(net()), method='dopri5')
y0: torch.randn(3, 2) | (torch.randn(3, 2), torch.randn(3, 2)) | torch.randn(3, 2, dtype=torch.float64) | \
torch.randn(2) | torch.randn(0, 2) | (torch.randn(3, 2), torch.randn(3, 2), torch.ones(3, 2)) | \
torch.randn(3, 2, requires_grad=True)
t: [0.0, 1.0] | torch.tensor([0.0, 0.5, 1.0]) | [1.0, 0.0] | torch.tensor([[0.0, 1.0], [0.5, 2.0], [0.0, 0.1]]) | \
[0.0] | np.linspace(0, 1, 3) | [0.0, 1e-9] | [0.0, 0.0, 1.0] | torch.tensor([0.0, 1.0], dtype=torch.float64)
x h: torch.randn(3, 2) | torch.randn(1, 2) | torch.randn(3, 2, dtype=torch.float64) | torch.randn(0, 2) | \
torch.randn(3, 2, requires_grad=True)
method: 'nystrom4' | 'nystrom6' | 'nystrom8' | 'tsit5' | 'dopri5' | 'rk4' | 'leapfrog' | 'blanes_moan4' | \
'rodas5p' | 'euler' | 'exponential' | 'implicit_adams' | 'scipy_solver' | 'dopri8' | 'midpoint' | 'bosh3'
gradient: 'direct' | 'checkpoint' | 'adjoint' | 'reversible' // save: 'exact' | 'interpolate'
rtol: 1e-3 | 1e-6 | 0.0 | 0.1 // atol: 1e-3 | 1e-6 | 0.0 // steps: 1 | 4
jump_times: [0.5] | torch.tensor([0.25, 0.5]) // max_steps: 1 | 1000
options: {} | {'step_size': 0.1} | {'min_step': 1e-3} | {'first_step': 0.1} | {'wrong': 1}
adjoint_options: {} | {'step_size': 0.1} | {'norm': 'seminorm'}
events: hbnode.Event(lambda t, y: (y[0] if isinstance(y, tuple) else y)[..., 0] - 0.5) | []
t_span: (0.0, 2.0) | (1.0, 0.0) // augment: 1 // damping: 0.5 | 0.0 | torch.tensor(0.5) // xi: 0.5 | 0.0
max_damping: 2.0 // initial_momentum initial_velocity: nn.Linear(2, 2) // activation: torch.tanh | nn.Hardtanh(-5, 5)
temperature: 0.0 | 2.0 // seed random_state: 0 // num_layers: 1 | 2 // dropout p: 0.0 | 0.5 // dtype: torch.float64
device: 'cpu' // momentum: 0.0 | 0.9 // step_size: 0.1 | 1.0
rule: 'momentum' | 'nag' | 'restart' | 'adam' | 'rmsprop' | 'adaptive' | hbnode.nn.rules.Adam(beta=0.99) | \
hbnode.nn.rules.ScheduledRestart(restart=2) // forget_bias: 0.0
hx: torch.zeros(1, 3, layer.hidden_size)
input_size num_features in_features out_features in_channels out_channels dim latent_size: 2 // hidden_size: 1 | 3 | 4
num_oscillators: 1 | 4 // frequency: (0.01, 0.2) | (0.1, 0.1) // decay: (0.01, 0.1)
missing: 'zero' | 'forward' | 'decay' // time_unit: 2.0 // eps: 1e-8 | 0.1
dt: [0.5, 1.0] | torch.rand(2, 3).cumsum(1) | [0.0] | [1.0, 0.5] // at grid: [0.0, 0.5] | [9.0] | np.linspace(0, 9, 4)
samples paths: 1 | 2 // generator: torch.Generator() // embed_dim: 4 | 8 // num_heads: 1 | 2
chunk_size: 2 | 64 // num_embeddings: 11 // d_model dim_feedforward: 8 // nhead: 2
tokens prompt: torch.randint(11, (2, 5))
attention cross_attention: 'momentum' | 'heavy_ball' | 'softmax' | 'linear' | 'delta'
attention_options: {} | {'causal': True} | {'chunk_size': 2}
connection: 'residual' | 'nesterov' | 'heavy_ball' | 'adam' // connection_momentum: 0.5
key_padding_mask memory_key_padding_mask: torch.zeros(2, 5, dtype=torch.bool) // n: 3
loss: lambda y: y.square().mean() // unit: 'h' | 's'
origin: '2020-01-01' // duplicates: 'mean' | 'first' | 'last' | 'error'
model: 'oscillators' | 'auto' | 'features' | 'odernn' | 'gru' // reconstruction: 'linear' | 'last'
level: 90 | [50, 80] // max_epochs n_members patience n_jobs: 1 // max_iter: 2 // progress compile: False
X series data: series() | series(2, 3)
""")
SERIES = table(r"""
x: torch.randn(2, 3, 2) | torch.randn(2, 3, 2, requires_grad=True) | \
torch.randn(2, 3, 2, dtype=torch.float64) | torch.where(torch.rand(2, 3, 2) > 0.5, torch.ones(2, 3, 2), nan)
t: torch.tensor([0.0, 1.0, 3.0]) | torch.rand(2, 3).cumsum(1) | torch.zeros(2, 3) | [0.0, 1.0, 2.0] | \
np.arange(3) | torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
mask: torch.ones(2, 3, 2, dtype=torch.bool) | torch.ones(2, 3, dtype=torch.bool) | torch.rand(2, 3, 2) > 0.5
lengths: [3, 2] | torch.tensor([3, 1])
""")
# Programs: lines of calls, with arguments drawn for a line that does not end in ")"; {a,b} makes one program for each.
# After # or below a program stand values of its own, and *SERIES for those above.
PROGRAMS = r"""
out = hbnode.odeint  # field: lambda t, y: -y | hbnode.HBNODE(net()) | hbnode.AdamNODE(net())
out = hbnode.torchdiffeq.{odeint,odeint_adjoint,odeint_event}
    func: hbnode.HBNODE(net()) | lambda t, y: -y // t: torch.tensor([0.0, 0.5, 1.0]) | torch.tensor([1.0, 0.0])
    y0: (torch.randn(3, 2), torch.randn(3, 2)) | torch.randn(3, 2) // t0: torch.tensor(0.0)
    event_fn: lambda t, y: t - 0.5 // options adjoint_options: {'step_size': 0.1} | {}
    adjoint_params: () | []
f = hbnode.torchdiffeq.odeint_dense; out = f(torch.tensor(0.5))
    func: lambda t, y: -y // y0: torch.randn(3, 2) // t0: torch.tensor(0.0) // t1: torch.tensor(1.0) // method: 'dopri5'
    rtol atol: 1e-3 // options: {}
field = hbnode.{NODE,HBNODE,GHBNODE,NesterovNODE,AdamNODE}; block = hbnode.ODEBlock(field); out = block
    rates: (1.0, 1.0) | (0.5, 2.0)
field = hbnode.ANODE; block = hbnode.ODEBlock(field); out = block  # func: hbnode.nn.MLP(3, [3], 3)
field = hbnode.SONODE; block = hbnode.ODEBlock(field); out = block  # func: lambda h, v: -h - v
field = hbnode.PortHamiltonian; block = hbnode.ODEBlock(field); out = block
    potential: lambda h: h.square().sum(-1).square()
block = hbnode.{ODEBlock,HeavyBallODEBlock}; out = block; out = out, block.trajectory
out = hbnode.HeavyBallODEBlock(net()).with_integral
    integrand: lambda t, y, f: f[0].square().sum(-1)
event = hbnode.Event; out = hbnode.odeint
    fn: lambda t, y: y[0][..., 0] - 0.5 | lambda t, y: t - 0.5 // jump: lambda t, y: (y[0], -y[1])
    direction: 1 | -1 | 0 // max_count: 1 | 3 // field: hbnode.HBNODE(lambda t, h: -4 * h)
    y0: (torch.randn(3, 2), torch.randn(3, 2)) // t: [0.0, 2.0] | torch.tensor([0.0, 0.5, 2.0])
    events: event | [event]
signal = hbnode.Signal; out = signal
    t: torch.linspace(0, 3, 5) | torch.rand(2, 5).cumsum(1)
    u: torch.randn(5) | torch.randn(5, 2) | torch.randn(2, 5, 1) // kind: 'linear' | 'cubic'
    outside: 'raise' | 'hold'
sde = hbnode.HeavyBallSDE; out = hbnode.sdeint
    sde: sde // y0: (torch.randn(3, 2), torch.randn(3, 2)) | sde.initial_state(torch.randn(3, 2)) // dt: 0.1 | 0.3
    method: 'ubu' | 'baoab' | 'euler' | 'shifted_nystrom' | 'milstein' | 'srk'
count = hbnode.count_nfe; out = count.__enter__()
steps = hbnode.diagnostics.record_steps; out = steps.__enter__()
layer = hbnode.ODERNN; out = layer
    *SERIES // field: 'node' | 'hbnode' | 'ghbnode'
layer = hbnode.ODERNN(2, 3, static_size=1); out = layer  # *SERIES // static: torch.randn(2, 1)
layer = hbnode.ODERNN(2, 3); layer.fit_time_unit; out = layer.filter; out = out, layer.forecast
    *SERIES // state: layer(torch.randn(2, 3, 2), [0.0, 1.0, 3.0])[1]
layer = hbnode.nn.{LatentODE,LatentSDE}; out = layer.elbo; out = out, layer.predict
    *SERIES // dt: 0.5 // method: 'nystrom8' // field: hbnode.HBNODE(net())
layer = hbnode.nn.{MomentumRNN,MomentumLSTM,MomentumGRU,MomentumDTRIV,DTRIV,TanhRNN}; out = layer
    x: torch.randn(2, 3, 2) | nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
layer = hbnode.nn.{MomentumRNNCell,MomentumLSTMCell,MomentumGRUCell,MomentumDTRIVCell,DTRIVCell}; out = layer
    hx: torch.zeros(3, layer.hidden_size)
r = hbnode.nn.rules.{Momentum,NAG,ScheduledRestart,Adam,RMSProp,AdaptiveMomentum}; \
out = hbnode.nn.MomentumGRU(2, 3, rule=r)(torch.ones(3, 2, 2))  # beta: 0.5 // restart: 2 // delta: 0.1
layer = hbnode.nn.{Oscillators,OscillatorStack}; out = layer; out = out, layer.forecast
    *SERIES // state: layer(torch.randn(2, 3, 2))[1] // output_size: 2
layer = hbnode.nn.Oscillators(2, 2, 3, noise=True); out = layer.filter; out = out, layer.log_likelihood  # *SERIES
layer = hbnode.nn.Oscillators(2, 2, 3, noise=True); out = layer.smooth; out = out, layer.sample_paths  # *SERIES
layer = hbnode.nn.OscillatorCell; out = layer  # dt: 0.5 | torch.rand(3) | 0.0
out = hbnode.nn.oscillator_ranges  # *SERIES
out = hbnode.nn.functional.oscillator_step  # damping dt: 0.1 | torch.rand(3) // stiffness: 1.0 | torch.rand(3) | 0.0
out = hbnode.nn.functional.{momentum_attention,heavy_ball_memory}
    q k v: torch.randn(2, 2, 5, 4) | torch.randn(2, 2, 5, 4, requires_grad=True)
    momentum: 0.5 | 0.0 | torch.rand(2) // log_momentum log_decay: None | -0.5 | -torch.rand(2, 2, 5)
    step write: 0.5 | torch.rand(2, 2, 5) // delta: 'plain' | False | 'decayed'
    cu_seqlens: torch.tensor([0, 2, 5])
layer = hbnode.nn.{MomentumAttention,HeavyBallMemory,SoftmaxAttention}; out = layer
    query key value: torch.randn(5, 2, layer.embed_dim) // momentum: True | False | 0.5 // decay: True | False
layer = hbnode.nn.MomentumTransformer; out = layer; out = out, layer.generate
    activation: 'gelu' | 'relu' // output_size top_k: 3
layer = hbnode.nn.{MomentumTransformerLayer,MomentumTransformerDecoderLayer}; out = layer
    activation: 'gelu' | 'relu' // x memory: torch.randn(5, 2, 8)
net = hbnode.nn.MLP; out = net(*[torch.zeros(())] * net.time_dependent, torch.ones(3, 2))
    hidden: [3] | [] // activation: nn.Tanh
net = hbnode.nn.ConvNet; out = net(*[torch.zeros(())] * net.time_dependent, torch.ones(1, 2, 3, 3))
    hidden: 3 // activation: nn.Tanh
layer = hbnode.nn.Standardize; layer.fit; out = layer; out = layer.inverse  # *SERIES
layer = hbnode.nn.SolveDropout; out = layer
out = hbnode.nn.match_parameters  # make: lambda n: nn.Linear(n, n) // parameters: 100
net, x, y = nn.Linear(2, 1), torch.randn(5, 2), torch.rand(5, 1); hf = hbnode.optim.HessianFree; out = hf.step
    params: net.parameters() // loss: 'mse' | 'bce' | 'cross_entropy' // max_cg: 5 // preconditioner_samples: 2
    case_dim: 0 // forward curvature: lambda: (net(x), y) | lambda: (net(x), (y > 0.5).float())
flow = hbnode.distributions.HeavyBallFlow; out = flow.elbo; out = out, flow.rsample; out = out, flow.log_prob_bound
    method: 'blanes_moan4' | 'leapfrog' // h: torch.randn(3, 2) // n: 3 | (2, 3) | () // condition_dim: 0
sampler = hbnode.distributions.HeavyBallAnnealing; out = sampler.log_z; out = out, sampler.bound
    log_prob: lambda h: -h.square().sum(-1)
    prior: torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1) // steps: 3
    schedule: [0.0, 0.2, 0.5, 1.0]
s = hbnode.data.from_long; out = s.inputs()
    table: frame() | frame().iloc[::-1] | dated() // id: 'id'
    time: 'time' // values: ['a', 'b'] | 'a'
s = hbnode.data.from_long(dated(), id='id', time='time', values='a', unit='h'); \
out = s.durations; out = s.dates; out = s.times
    durations: ['1h', '2h'] | pd.to_timedelta(['1h']) // dates: ['1970-01-02'] | pd.to_datetime(['1970-01-02'])
s = hbnode.data.as_series; out = s.inputs()  # data: series() | torch.randn(2, 3, 2) | np.random.rand(2, 5, 1)
out = hbnode.data.bucketed_batches; out = [*out][:3] + list(); out = list(out)
    lengths: [3, 2, 5, 1] | torch.tensor([3, 2, 5]) // batch_size: 2 | 1 | 9
s = hbnode.data.as_series(series()); data = hbnode.data.Dataset; out = hbnode.data.collate; out = s.select
    series: s // targets: torch.arange(6) // items: [data[0], data[1]]
    index: [0, 1] | slice(0, 2) | torch.tensor([2])
out = hbnode.diagnostics.{nfe_vs_tolerance,adjoint_norms}
    tolerances: [1e-2, 1e-3] | [1e-1] // reference_tolerance: 1e-8
out = hbnode.diagnostics.spectrum  # t: 0.5 // x: torch.randn(1, 2) | torch.randn(2)
f = hbnode.features.{OscillatorFeatures,RocketFeatures}; f.fit; out = f.transform
    damping_ratio: (0.1, 0.5) // num_features: 84
s = hbnode.estimators.OscillatorSmoother; s.fit; out = s.reconstruct; out = s.impute; out = s.forecast
    num_oscillators: 1 | 2
c = hbnode.estimators.{SeriesRegressor,SeriesForecaster,SeriesClassifier}; c.fit; out = c.predict
    X: series(12) | series(12, 20) // y: np.arange(12) % 2 | np.arange(12.0) // hidden_size: 2
    ahead: [1.0, 2.0] | [0.5]
"""
FORCED = {"max_epochs", "n_members", "max_iter", "num_features", "y", "forward", "static"}  # given in each call
VARIADIC = {"args", "kwargs"}
SHAPES = r"dictionary|truth value|[sS]eed|unpack|at least 1D|shape|"
SHAPES += r"size|dim|dtype|[dD]evice|[mM]eta|[sS]parse|Long|Bool|Half|Complex|broadcast|convert|nan|inf"
QUIET = {"compile", "progress", "n_jobs"}  # never odd: they start compilers and processes


def read_programs():
    """Return ``PROGRAMS`` as a dict from the text of a program to its lines and its own values."""
    programs = {}
    for block in re.split(r"\n(?=\S)", PROGRAMS.strip().replace("\\\n", "")):
        calls, *own = re.split("\n|  # ", block)
        values = (SERIES if "*SERIES" in block else {}) | table("\n".join(own))
        family = re.search(r"{(.*?)}", calls)
        for name in family[1].split(",") if family else [""]:
            text = calls.replace(family[0], name) if family else calls
            programs[text] = text.split("; "), values
    return programs


def series(rows=6, length=8):
    rng = np.random.default_rng(0)
    return [(np.sort(rng.uniform(0, 10, length)), rng.normal(size=(length, 2))) for _ in range(rows)]


def frame():
    time, values = np.tile(np.arange(3) * 1.5, 4), np.random.default_rng(0).normal(size=(12, 2))
    return pd.DataFrame({"id": np.repeat(np.arange(4), 3), "time": time, "a": values[:, 0], "b": values[:, 1]})


def dated():
    return frame().assign(time=pd.to_datetime(frame().time, unit="h"))


class TooLong(BaseException):
    """Raised by the alarm."""


def alarm(*_):
    raise TooLong


def candidates(parameter, own):
    """The sources of ordinary values of an argument."""
    kind = str(parameter.annotation)
    literals = re.findall("'[^']*'", kind) if "Literal" in kind else ["True", "False"] if "bool" in kind else []
    return own.get(parameter.name) or VALUES.get(parameter.name) or literals


def arguments(rng, target, own, odd):
    """Draw a call's arguments, and the odd ones among them."""
    signature = inspect.signature(target.forward if isinstance(target, nn.Module) else target)
    known = {p.name: (p, candidates(p, own)) for p in signature.parameters.values() if p.name not in VARIADIC}
    needed = [name for name, (p, values) in known.items() if p.default is p.empty or (values and name in FORCED)]
    optional = [name for name, (_, values) in known.items() if values and name not in needed]
    chosen = rng.sample(optional, min(rng.randrange(4), len(optional)))
    values = {name: rng.choice([known[name][1][0], rng.choice(known[name][1])]) for name in [*needed, *chosen]}
    strange = sorted(known.keys() - QUIET) if odd else []
    strange = {name: rng.choice(ODD) for name in rng.sample(strange, min(rng.choice([1, 1, 2]), len(strange)))}
    return ", ".join(f"{name}={value}" for name, value in (values | strange).items()), strange


def tensors(names):
    """All tensors in the result of a program, and the gradients of its sum with respect to all parameters."""
    found = [x for x in tree_leaves(names["out"]) if isinstance(x, torch.Tensor)]
    terms = [x.double().nan_to_num().sum() for x in found if x.requires_grad]
    if terms:
        sum(terms).backward()
    modules = [value for value in names.values() if isinstance(value, nn.Module)]
    return [*found, *(p.grad for module in modules for p in module.parameters() if p.grad is not None)]


def is_clear(error, strange, names):
    """Whether an error has a fix, shows what was passed, or comes from the user's own code."""
    text, files = str(error), [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    code = [file for file in files if "site-packages" not in file and "/lib/python" not in file]
    if "Fix:" in text or "mat1 and mat2" in text or code[-1] in (__file__, "<call>"):
        return True
    if not strange or not isinstance(error, (TypeError, ValueError, RuntimeError, AttributeError, OverflowError)):
        return False
    kinds = [type(eval(source, names)).__name__ for source in strange.values()]
    shown = any(re.search(rf"\b{re.escape(word)}\b", text) for word in [*strange, *kinds])
    return shown or isinstance(error, TypeError) or (not isinstance(error, AttributeError) and re.search(SHAPES, text))


def judge(rng, lines, own):
    """Draw and run a program; return "returned", "error" for a clear one or a kind of crash, and the source."""
    names = {"torch": torch, "nn": nn, "hbnode": hbnode, "np": np, "pd": pd, "nan": math.nan, "inf": math.inf}
    names |= {"net": lambda: hbnode.nn.MLP(2, [3], 2), "series": series, "frame": frame, "dated": dated}
    program, strange = [], {}
    drawn = [line for line in lines if not line.endswith(")")]
    odd = rng.choice([*drawn, *[None] * len(drawn)])
    torch.manual_seed(0)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        for line in lines:
            program.append(line)
            if line in drawn:
                target = eval(line.split(" = ")[-1].split(", ")[-1], names)
                text, new = arguments(rng, target, own, line == odd)
                program[-1], strange = f"{line}({text})", strange | new
            exec(compile(program[-1], "<call>", "exec"), names)
        found = tensors(names)
    except TooLong:  # torchdiffeq's solvers have no limit of steps, or one of 2**31
        return "error" if strange and "hbnode.torchdiffeq." in program[0] else "too long", "\n".join(program)
    except Exception as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        frames = traceback.extract_tb(error.__traceback__)
        theirs = "hbnode.torchdiffeq." in program[0] and any("torchdiffeq/_impl" in f.filename for f in frames)
        if theirs or is_clear(error, strange, names):
            return "error", ""
        where = next((f"{f.filename.split('/')[-1]}:{f.lineno}" for f in frames[::-1] if "/hbnode/" in f.filename), "")
        kind = re.sub(r"[0-9]+|'[^']*'", "#", str(error))[:60]
        return f"{type(error).__name__} {where} {kind}", "\n".join([*program, f"    {error}"[:200]])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    text = "\n".join(program)
    may_be = strange or re.search(r"nan|vent", text)  # the time of no event is inf
    return "returned" if may_be or all(x.isfinite().all() for x in found) else "not finite", text


def fuzz(minutes, chosen="", seed=0, rounds=None):
    """Call the programs in turn, for minutes of processor time or so many times each; return crashes and counts."""
    signal.signal(signal.SIGPROF, alarm)
    end, crashes, count, rng = time.process_time() + 60 * minutes, {}, collections.Counter(), random.Random(seed)
    programs = {name: program for name, program in read_programs().items() if re.search(chosen, name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in itertools.cycle(programs) if rounds is None else list(programs) * rounds:
            if time.process_time() > end:
                break
            kind, text = judge(rng, *programs[name])
            count[kind] += 1
            if kind not in ("returned", "error") and len(text) < len(crashes.get(kind, text + "+")):
                crashes[kind] = text
    counts = f"{sum(count.values())} calls of {len(programs)} programs, {count['returned']} returned, "
    text = "\n\n".join(f"## {kind}\n{text}" for kind, text in sorted(crashes.items()))
    return text, f"{counts}{count['error']} clear errors, {len(crashes)} kinds of crash"


def test_every_public_function_and_module_is_called():
    modules = [hbnode.nn.rules, hbnode.nn.functional, hbnode.distributions, hbnode.data, hbnode.nn, hbnode]
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    called = {name for name, one in public.items() if inspect.isfunction(one) or hasattr(one, "parameters")}
    assert called - set(re.findall(r"\w+", PROGRAMS)) - {"Field", "methods", "tanh_hidden"} == set()


def test_a_few_calls():
    crashes, _ = fuzz(math.inf, "^(?!.*(features|estimators|torchdiffeq))", rounds=1)
    assert not crashes, crashes


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_calls_for_minutes():
    crashes, _ = fuzz(MINUTES)
    assert not crashes, crashes


if __name__ == "__main__":
    print(*fuzz(MINUTES, " ".join(sys.argv[1:]), seed=int(os.environ.get("FUZZ_SEED", "0"))), sep="\n")
