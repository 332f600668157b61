"""Causal linear-time attention compared with softmax attention: ``python -m benchmarks.attention``.

Five tables. *time*: forward passes and training steps at lengths from 256 to 16,384, over those of linear attention,
and how many times as fast as softmax attention. *memory*: what they add to the peak, each in a fresh process.
*generation*: tokens a second and the size of the state of transformers of two layers that step token by token, softmax
attention with a key-value cache. *precision*: relative errors in float32 of the heavy-ball memory, of the published
chunk algorithm and of the loop over the steps, against the loop in float64; the gates α and μ of each step are
log-uniform between the smallest and 1. *forms*: times of these three and of *reference*, the memory in differentiable
operations of torch, over those of the memory.

Contenders: *softmax* is ``scaled_dot_product_attention``; *momentum* is
:func:`hbnode.nn.functional.momentum_attention`, and *linear* the same with momentum 0; *heavy ball* is
:func:`hbnode.nn.functional.heavy_ball_memory` with the decayed delta rule and a gate of each kind for each token, and
*gated delta* (Gated DeltaNet) the same without momentum. A training step is forward and backward for q, k, v and the
gates, from a given gradient of the output.

Times are those of the processor, medians of runs that take turns in one process, on one thread; ratios are medians over
the rounds. Memory is the process's. Writes JSON with the machine in it, and a figure beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, pad, scaled_dot_product_attention

from benchmarks import harness
from benchmarks.harness import Options, Row, in_fresh_process, interleaved, milliseconds, panels, program, ratio
from hbnode.nn import _delta_rule
from hbnode.nn.attention import KeyValueCache
from hbnode.nn.functional import heavy_ball_memory, momentum_attention
from tasks.models.contenders import ContenderConfig

LENGTHS = (256, 1024, 4096, 16384)
TOKENS = (16, 3000)  # that are generated: sequences, length
HEADS, DIM = 8, 32
SMALLEST = (1.0, 0.5, 0.1, 1e-3, 1e-10, 1e-30)
SECTIONS = ("time", "memory", "generation", "precision", "forms")


def softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Return softmax attention."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def linear(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, momentum: float = 0.0) -> Tensor:
    """Return linear attention, with momentum if ``momentum`` is not 0."""
    return momentum_attention(q, k, v, momentum=momentum)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor, _: Tensor) -> Tensor:
    """Return the outputs of Gated DeltaNet."""
    return heavy_ball_memory(q, k, v, log_momentum=None, log_decay=decay, write=write)


def heavy_ball(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor, momentum: Tensor) -> Tensor:
    """Return the outputs of the heavy-ball memory, with step sizes bounded as in :class:`hbnode.nn.HeavyBallMemory`."""
    rest = 1 - momentum.exp()
    return ours(q, k, v, decay, momentum, rest * (3 * rest).clamp(max=1), write)


def ours(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, momentum: Tensor, step: Tensor, write: Tensor) -> Tensor:
    """Return the outputs of the heavy-ball memory, called with the arguments of :func:`loop`."""
    return heavy_ball_memory(q, k, v, log_momentum=momentum, log_decay=decay, step=step, write=write)


def loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, momentum: Tensor, step: Tensor, write: Tensor) -> Tensor:
    """Momentum DeltaNet step by step, from zero (arXiv:2605.05838); gates (batch, heads, length), logs of α and μ."""
    s = p = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    gates = (x[..., None, None].unbind(2) for x in (decay.exp(), momentum.exp(), step, write))
    for q_t, k_t, v_t, alpha, mu, gamma, eta in zip(
        *(x.unsqueeze(3).unbind(2) for x in (q, k, v)), *gates, strict=True
    ):
        p = mu * p + eta * k_t.mT * (v_t - alpha * k_t @ s)
        s = alpha * s + gamma * p
        outputs.append(q_t @ s)
    return torch.cat(outputs, 2)


def published(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, momentum: Tensor, step: Tensor, write: Tensor, size: int = 64
) -> Tensor:
    """The same by the chunk algorithm of arXiv:2605.05838, whose masks are differences of sums over the whole chunk.

    With products ā_r, m̄_r of the gates from the start of the chunk and b_r = Σ_{i ≤ r} s_i m̄_i / ā_i, the weight of
    step c in row r is ā_r / m̄_c (b_r - b_{c-1}). As published, b is kept as a logarithm. The length is a multiple of
    ``size``.
    """
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    decay, momentum, step, write = (x.unflatten(2, (-1, size)) for x in (decay, momentum, step, write))
    a, m = decay.cumsum(-1), momentum.cumsum(-1)
    b = torch.logcumsumexp(step.log() + m - a, -1)
    before = pad(b[..., :-1], (1, 0), value=-torch.inf)
    g = ((a + b).unsqueeze(-1) - m.unsqueeze(-2)).exp() * -torch.expm1(before.unsqueeze(-2) - b.unsqueeze(-1))
    g = torch.where(torch.ones(size, size, dtype=torch.bool).tril(), g, 0.0)
    f, a_bar, k_tilde, p = (a + b).exp(), a.exp(), write.unsqueeze(-1) * k, decay.exp().unsqueeze(-1) * k
    scores = g * (q @ k_tilde.mT)
    t = pad(g[..., :-1, :], (0, 0, 1, 0)) * (p @ k_tilde.mT)
    starts = pad(a_bar[..., :-1], (1, 0), value=1.0), pad(f[..., :-1], (1, 0))
    right = torch.cat([v, *(x.unsqueeze(-1) * p for x in starts)], -1)
    u, y, z = torch.linalg.solve_triangular(t, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1], k.shape[-1]], -1
    )
    to_s, to_p = g[..., -1, :, None] * k_tilde, (m[..., -1:] - m).exp().unsqueeze(-1) * k_tilde
    s = velocity = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    chunks = (u, y, z, scores, a_bar.unsqueeze(-1) * q, f.unsqueeze(-1) * q, to_s, to_p, a_bar, f, m.exp())
    for u_i, y_i, z_i, w, q_s, q_p, s_i, p_i, a_i, f_i, m_i in zip(*(x.unbind(2) for x in chunks), strict=True):
        e = u_i - y_i @ s - z_i @ velocity
        outputs.append(w @ e + q_s @ s + q_p @ velocity)
        last_a, last_f, last_m = (x[..., -1, None, None] for x in (a_i, f_i, m_i))
        s, velocity = last_a * s + last_f * velocity + s_i.mT @ e, last_m * velocity + p_i.mT @ e
    return torch.cat(outputs, 2)


def reference(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, momentum: Tensor, step: Tensor, write: Tensor) -> Tensor:
    """The same in differentiable operations of torch, without a backward pass of its own."""
    s, p = q.new_zeros(2, *q.shape[:2], q.shape[-1], v.shape[-1]).unbind()
    return _delta_rule.reference(("decayed", 64), q, k, v, momentum, decay, step, write, s, p)[0]


FORMS = {"ours": ours, "published": published, "loop": loop, "reference": reference}
CONTENDERS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax,
    "linear": linear,
    "momentum": partial(linear, momentum=0.9),
    "gated delta": gated_delta,
    "heavy ball": heavy_ball,
}


class Contender:
    """An attention with its inputs, ready to be timed."""

    def __init__(self, attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.attend, self.inputs = attend, [x.requires_grad_() for x in inputs]
        self.gradient = torch.randn_like(self.inputs[2])

    @classmethod
    def of(cls, name: str, length: int) -> Contender:
        """By its name in :data:`CONTENDERS`; keys of norm 1, decays near 0.95 and momenta near 0.9."""
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, length, DIM).unbind()
        decay, write, momentum = torch.randn(3, 1, HEADS, length).unbind()
        gates = logsigmoid(decay + 3.0), torch.sigmoid(write), logsigmoid(momentum + 2.2)
        return cls(CONTENDERS[name], (q, normalize(k, dim=-1), v, *gates))

    @torch.no_grad()
    def forward(self) -> None:
        """Compute the outputs without gradients."""
        self.attend(*self.inputs)

    def train(self) -> None:
        """Compute the outputs and the gradients of the inputs."""
        for x in self.inputs:
            x.grad = None
        self.attend(*self.inputs).backward(self.gradient)


def timed(contenders: dict[str, Contender], labels: Row, kind: str, base: str, repeats: int) -> list[Row]:
    """Forward passes and training steps, over one contender, and how many times as fast as softmax attention."""
    found: dict[str, Row] = {name: {**labels, kind: name} for name in contenders}
    for what in ("forward", "train"):
        times = interleaved({name: getattr(each, what) for name, each in contenders.items()}, repeats, warm=1)
        for name, mine in times.items():
            found[name] |= {f"{what}_ms": milliseconds(mine), f"{what}_ratio": ratio(mine, times[base])}
            if "softmax" in times:
                found[name][f"{what}_faster"] = ratio(times["softmax"], mine)
    return list(found.values())


def peak(name: str, length: int) -> dict[str, float]:
    """Return the MiB that a forward pass and a training step add to the peak memory of this fresh process."""
    Contender.of(name, 64).train()  # what libraries keep for good
    contender = Contender.of(name, length)
    return harness.added_memory({"forward": contender.forward, "train": contender.train})


def memory(length: int) -> list[Row]:
    """Return the peak memory of each kind of attention, each in a separate process."""
    return [{"length": length, "attention": name, **in_fresh_process(peak, name, length)} for name in CONTENDERS]


@torch.no_grad()
def generation(batch: int, count: int) -> list[Row]:
    """Return rows for transformers that process the same tokens step by step, alternating 30 times."""
    sizes = {"d_model": HEADS * DIM, "heads": HEADS, "layers": 2, "feedforward": 1024}
    configs = {name: ContenderConfig(model=name.replace(" ", "_"), **sizes) for name in CONTENDERS}
    models = {name: config.make_transformer(256).eval() for name, config in configs.items()}
    states = {name: model.init_state(batch) for name, model in models.items()}
    tokens = torch.randint(256, (batch, max(1, count // 30))).unbind(1)

    def turn(name: str) -> None:
        for token in tokens:
            _, states[name] = models[name].step(token, states[name])

    rows: list[Row] = []
    times = interleaved({name: partial(turn, name) for name in models}, 30, warm=0)
    for name, mine in times.items():
        speed = {"tokens_per_s": batch * len(tokens) / statistics.mean(mine)}
        speed["faster"] = statistics.mean(times["softmax"]) / statistics.mean(mine)
        row = {"model": name, "tokens": 30 * len(tokens), "batch": batch, **speed}
        rows.append(row | {"last_MiB": _mebibytes(states[name].layers)})
    return rows


def _mebibytes(state: Any) -> float:
    """Return the size in MiB of the tensors in a state."""
    if isinstance(state, KeyValueCache):
        return _mebibytes((state.keys, state.values))
    if isinstance(state, Tensor):
        return state.numel() * state.element_size() / 2**20
    return 0 if state is None else sum(_mebibytes(part) for part in state)


def gated_inputs(length: int, heads: int, smallest: float) -> list[Tensor]:
    """q, k, v, log α, log μ, s and η; keys of norm 1, s = .1, and η between 0 and 1."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, DIM).unbind()
    decay, momentum, write = torch.rand(3, 1, heads, length).unbind()
    logs = (x * torch.tensor(smallest).log() for x in (decay, momentum))
    return [q, normalize(k, dim=-1), v, *logs, torch.full_like(write, 0.1), write]


@torch.no_grad()
def precision(smallest: float) -> Row:
    """Relative errors of the outputs in float32, by the norm of all outputs."""
    inputs = gated_inputs(1024, 2, smallest)
    wanted = loop(*(x.double() for x in inputs))
    errors = {name: harness.relative(FORMS[name](*inputs).double(), wanted) for name in ("ours", "published", "loop")}
    return {"smallest_gate": f"{smallest:g}"} | errors


def draw(report: dict[str, Any], machine: str) -> Any:
    """Draw the time of a training step, its peak memory, and the speed of generation."""
    if not {"time", "memory", "generation"} <= report.keys():
        return None
    figure, (by_time, by_memory, by_tokens) = panels((12, 4), columns=3)
    for ax, section, column in ((by_time, "time", "train_ms"), (by_memory, "memory", "train_MiB")):
        for name in CONTENDERS:
            own = [(row["length"], row[column]) for row in report[section] if row["attention"] == name and row[column]]
            ax.plot(*zip(*own, strict=True), marker="o", label=name)
        ax.set(xscale="log", yscale="log", xlabel="length")
        lengths = sorted({row["length"] for row in report[section]})
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        ax.set_xticks([], minor=True)
    by_time.set(ylabel="milliseconds", title="Training step")
    by_memory.set(ylabel="MiB", title="Peak of a training step")
    rows = report["generation"]
    by_tokens.barh([row["model"] for row in rows], [row["tokens_per_s"] for row in rows], color="0.6")
    for place, row in enumerate(rows):
        by_tokens.text(0, place, f" {row['last_MiB']:.2f} MiB of state", va="center", fontsize=8)
    by_tokens.set(xlabel="tokens a second", title=f"{rows[0]['tokens']:,} tokens, batch {rows[0]['batch']}")
    by_tokens.invert_yaxis()
    by_time.legend()
    figure.suptitle(f"{HEADS} heads of {DIM}, float32, 1 thread, {machine}", fontsize=10)
    return figure


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield the selected sections."""
    for length in LENGTHS if "time" in options.sections else ():
        contenders = {name: Contender.of(name, length) for name in CONTENDERS}
        yield "time", timed(contenders, {"length": length}, "attention", "linear", options.repeats)
    for length in LENGTHS[-2:] if "memory" in options.sections else ():
        yield "memory", memory(length)
    if "generation" in options.sections:
        yield "generation", generation(*TOKENS)
    if "precision" in options.sections:
        yield "precision", [precision(smallest) for smallest in SMALLEST]
    for length in (1024, 4096) if "forms" in options.sections else ():
        inputs = gated_inputs(length, HEADS, 0.8)
        contenders = {name: Contender(form, inputs) for name, form in FORMS.items()}
        yield "forms", timed(contenders, {"length": length}, "form", "ours", options.repeats)


main = program(__doc__, "attention", measured, draw=draw, repeats=7, sections=SECTIONS)


if __name__ == "__main__":
    main()
