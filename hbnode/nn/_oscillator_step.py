r"""The closed-form step of damped oscillators x'' + γ x' + κ x = u, and the scan of a series through them.

A scan maps samples s_t to outputs y_t = C h_t + D s_t. The state h = (v, x) of each oscillator, with v = x', follows
h_t = M_t h_{t-1} + f_t W s_t. The gap of sample t is the time between samples t - 1 and t. The 2 × 2 matrix M_t is the
transition over this gap. The vector f_t is (1, 0) if samples are impulses. It is :func:`held_response` if an input is
held constant over the gap.

The module has a reference implementation, which loops over the samples, and a fused one with its own VJP. The fused
implementation transforms underdamped oscillators to normal coordinates. In these a transition is a rotation and a
decay, which takes fewer operations than a product with a general 2 × 2 matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hbnode import _torch
from hbnode._checks import to_tensor

Number = float | Tensor
Pair = tuple[Tensor, Tensor]
Entries = tuple[Tensor, ...]  # entries vv, vx, xv, xx of M; if the input is held, also the entries fv, fx of f
Options = tuple[str, bool]  # kind of transition ("exact", "imex" or "rotation"), and whether the input is held

_TERMS = 10  # number of terms of the series of c and s in oscillator_step for |z| <= 1; the next is below 1e-18
_HELD_TERMS = 26  # number of terms of the series in held_response for γΔ <= 1.5; the next term is below 1e-19
_OPERATION_SIZE = 28_672  # elements of a tensor in one operation, so that a step fits into the level 2 cache
_CHUNK_STEPS = 32  # default number of samples in a chunk
_SHORTEST_CHUNK = 8  # least number of samples in a chunk
_SEGMENT_SIZE = 1_048_576  # number of velocities, over batch, samples and oscillators, in a segment


# The closed form of a step


class OscillatorStep(NamedTuple):
    """The entries of the 2 × 2 matrix Φ that maps the state (v, x) of an oscillator to (vv v + vx x, xv v + xx x)."""

    vv: Tensor
    vx: Tensor
    xv: Tensor
    xx: Tensor


def oscillator_step(damping: Number, stiffness: Number, dt: Number) -> OscillatorStep:
    r"""Return the exact transition of damped oscillators over a time without input.

    The oscillator x'' + γ x' + κ x = 0 has the state (v, x) with v = x'. After a time Δ the state is Φ(Δ)(v, x). With
    a = γ/2, z = (κ - a²)Δ², c = cos √z and s = sin √z / √z,

    .. math:: \Phi(\Delta) = e^{-a\Delta}
        \begin{pmatrix} c - a\Delta s & -\kappa\Delta s \\ \Delta s & c + a\Delta s \end{pmatrix}.

    The formula holds for underdamped, critical and overdamped oscillators, for γ = 0 and for κ = 0, with smooth
    transitions. The function is differentiable any number of times with respect to every argument.

    Arguments:
        damping: γ, in 1 / time; broadcast with the other arguments.
        stiffness: κ, in 1 / time².
        dt: Δ, a time >= 0.

    Returns:
        A named tuple of the entries ``vv``, ``vx``, ``xv`` and ``xx`` of Φ, each of the broadcast shape.

    Raises:
        ValueError: if a time in ``dt`` is negative, NaN or infinite. Times are not checked while torch.compile,
            torch.export or torch.jit.trace records the program, or in transforms of torch.func.

    Example:
        >>> import hbnode
        >>> step = hbnode.nn.functional.oscillator_step(0.0, 1.0, 3.141592653589793 / 6)  # a twelfth of a period
        >>> [round(float(entry), 4) for entry in step]
        [0.866, -0.5, 0.5, 0.866]
    """
    return exact_step(*_checked(damping, stiffness, dt))


def exact_step(gamma: Tensor, kappa: Tensor, dt: Tensor) -> OscillatorStep:
    """Compute :func:`oscillator_step` without checking ``dt``, because a check would wait for the GPU."""
    a = gamma / 2
    z, drag = (kappa - a.square()) * dt.square(), a * dt
    is_over, is_near = z < -1.0, z.abs() <= 1.0
    small = torch.where(is_near, z, 0.0)  # near critical damping c and s are computed by their series
    root = torch.where(is_near, 1.0, z.abs()).sqrt()
    # For overdamped oscillators the exponentials include e^{-aΔ}, and -a + √(a² - κ) is computed without cancellation
    slow = torch.where(is_over, -(kappa * dt.square()) / (drag + root), -drag).exp()
    fast = torch.where(is_over, -drag - root, -drag).exp()
    phase = torch.where(is_over, 0.0, root)
    cosine = _polynomial(small, [(-1.0) ** n / math.factorial(2 * n) for n in range(_TERMS)])
    sine = _polynomial(small, [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(_TERMS)])
    c = torch.where(is_over, (slow + fast) / 2, slow * torch.where(is_near, cosine, phase.cos()))
    away = torch.where(is_over, (slow - fast) / 2, slow * phase.sin()) / root
    s = dt * torch.where(is_near, slow * sine, away)
    return OscillatorStep(c - a * s, -kappa * s, s, c + a * s)


def held_response(damping: Number, stiffness: Number, dt: Number) -> Pair:
    r"""Return the responses :math:`F_v` and :math:`F_x` of v and x to an input of 1 that is held for a time Δ.

    The oscillator x'' + γ x' + κ x = 1 starts at v = x = 0, with v = x'. With the transition Φ of
    :func:`oscillator_step`, :math:`F_v = \Phi_{xv}` and :math:`F_x = (1 - \Phi_{xx})/\kappa`. In two cases another
    formula keeps more digits of F_x. For strong damping, γΔ > 1.5 and κ < 3γ²/16, with the rates
    :math:`\lambda_\pm = -\gamma/2 \pm \sqrt{\gamma^2/4 - \kappa}` and :math:`\varphi_1(y) = (e^y - 1)/y`, it is
    :math:`F_x = \Delta(\varphi_1(\lambda_+\Delta) - \varphi_1(\lambda_-\Delta))/(\lambda_+ - \lambda_-)`. For weaker
    damping and κΔ² <= 0.4 it is the series :math:`F_x = \Delta^2 \sum_{n \ge 2} c_n` with c₁ = 0, c₂ = 1/2 and
    :math:`c_{n+2} = -((n+1)\gamma\Delta c_{n+1} + \kappa\Delta^2 c_n)/((n+1)(n+2))`.

    Arguments:
        damping: γ, in 1 / time; broadcast with the other arguments.
        stiffness: κ, in 1 / time².
        dt: Δ, a time >= 0.

    Returns:
        The pair of :math:`F_v` and :math:`F_x`, each of the broadcast shape.

    Raises:
        ValueError: if a time in ``dt`` is negative, NaN or infinite. Times are not checked while torch.compile,
            torch.export or torch.jit.trace records the program, or in transforms of torch.func.
    """
    return exact_response(*_checked(damping, stiffness, dt))


def exact_response(gamma: Tensor, kappa: Tensor, dt: Tensor) -> Pair:
    """Compute :func:`held_response` without checking ``dt``, because a check would wait for the GPU."""
    gamma, kappa, gap = torch.broadcast_tensors(gamma, kappa, dt)
    step = exact_step(gamma, kappa, gap)
    drag, spring = gamma * gap, kappa * gap.square()
    is_slow = (drag > 1.5) & (spring < 0.1875 * drag.square())  # overdamped, with two very different rates
    is_stiff = ~is_slow & (spring > 0.4)
    direct = (1 - step.xx) / torch.where(is_stiff, kappa, 1.0)
    a, b = torch.where(is_stiff | is_slow, 0.0, drag), torch.where(is_stiff, 0.0, spring)
    before, term = torch.zeros_like(a), torch.full_like(a, 0.5)
    total = term
    for n in range(1, _HELD_TERMS):
        before, term = term, -((n + 1) * a * term + b * before) / ((n + 1) * (n + 2))
        total = total + term
    series = gap.square() * total
    a, b = torch.where(is_slow, drag / 2, 2.0), torch.where(is_slow, spring, 1.0)
    root = (a.square() - b).sqrt()
    slow, fast = -b / (a + root), -(a + root)
    is_small = slow.abs() < 1e-3
    phi = _polynomial(torch.where(is_small, slow, 0.0), [1 / math.factorial(n + 1) for n in range(6)])
    away = torch.where(is_small, 1.0, slow)
    phi = torch.where(is_small, phi, torch.expm1(away) / away)
    overdamped = gap.square() * (phi - torch.expm1(fast) / fast) / (2 * root)
    return step.xv, torch.where(is_stiff, direct, torch.where(is_slow, overdamped, series))


def _checked(damping: Number, stiffness: Number, dt: Number) -> tuple[Tensor, ...]:
    """Convert damping, stiffness and ``dt`` to tensors, and return them.

    Raise ValueError if a time in ``dt`` is negative, NaN or infinite.
    """
    gamma, kappa, dt = _as_tensors(damping, stiffness, dt)
    if _torch.may_look() and not dt.is_meta:
        wrong = dt[~(dt.isfinite() & (dt >= 0))]
        if len(wrong):
            raise ValueError(
                f"dt must hold finite times >= 0, got {wrong[0].item()}. "
                "Fix: dt = later - earlier, of finite times in increasing order."
            )
    return gamma, kappa, dt


def _as_tensors(*values: Number) -> tuple[Tensor, ...]:
    """Convert numbers and tensors to tensors of one dtype and device.

    The dtype is the promoted dtype of the tensors among ``values``, or float64 if all are numbers.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    dtype, device = torch.float64, None
    if tensors:
        device = ([each for each in tensors if each.dim()] or tensors)[0].device
        dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    fix = "a number or a tensor of real numbers"
    return tuple(
        to_tensor(value, name, fix, dtype, value.device if isinstance(value, Tensor) else device)
        for name, value in zip(("damping", "stiffness", "dt"), values, strict=True)
    )


def _polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    value = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * z + coefficient
    return value


def accumulation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for sums of values of ``dtype``: float64 if the device supports it, otherwise ``dtype``."""
    return dtype if device.type == "mps" else torch.float64


def transition(kind: str, is_held: bool, rates: Tensor, dt: Tensor) -> Entries:
    """Return the entries vv, vx, xv, xx of the transition M over a time dt; if the input is held, also fv, fx of f.

    The module docstring defines M and f.

    Arguments:
        kind: "exact"; "imex", a step with implicit damping and explicit stiffness; or "rotation", the exact step in the
            coordinates of :func:`_normal_coordinates`.
        is_held: whether the input is constant over the time dt.
        rates: dampings and stiffnesses of P oscillators, (2, P). If ``kind`` is "rotation", decay rates and angular
            frequencies.
        dt: times, which broadcast with a shape (P,).
    """
    first, second = rates
    if kind == "rotation":
        if not is_held:
            fall, phase = (dt * -first).exp(), dt * second
            c, s = fall * phase.cos(), fall * phase.sin()
            return c, -s, s, c
        lost, half = (dt * -first).expm1(), dt * (second / 2)
        fall, sine = lost + 1, half.sin()
        s = half.cos().mul_(sine).mul_(fall).mul_(2)
        fallen = sine.square().mul_(fall).mul_(2)  # e^{-aΔ} (1 - cos ωΔ), computed without cancellation
        c = fall - fallen
        return c, -s, s, c, lost - fallen, s
    if kind == "imex":
        implicit = 1 / (1 + first * dt)
        kick = implicit * dt
        slide = kick * dt
        entries: Entries = (implicit, -second * kick, kick, 1 - second * slide, kick, slide)
        return entries if is_held else entries[:4]
    step = exact_step(first, second, dt)
    return (*step, *exact_response(first, second, dt)) if is_held else tuple(step)


# The scan


class ScanInput(NamedTuple):
    """The tensors of a scan of P oscillators with states (v, x).

    Attributes:
        x: samples (batch, T, input_size).
        v0: v before the first transition, (batch, P). The scan is computed in the dtype of ``v0``.
        x0: x before the first transition, (batch, P).
        w: input map W, (P, input_size).
        c: output map C, (output_size, 2 P).
        d: skip connection D, (output_size, input_size); None for zeros.
        rates: dampings and stiffnesses, (2, P). If ``gaps`` is None, the entries that :func:`transition` returns,
            stacked to (4, P), or to (6, P) for a held input.
        gaps: time before each sample, (batch or 1, T); None if all transitions are equal.
        ends: index of the last sample of each sequence (batch,); None for T - 1.
        is_underdamped: mask (P,) of the oscillators whose states are in normal coordinates. Their ``rates`` are the
            decay rate a and the angular frequency ω. None if no oscillator is in normal coordinates.
    """

    x: Tensor
    v0: Tensor
    x0: Tensor
    w: Tensor
    c: Tensor
    d: Tensor | None
    rates: Tensor
    gaps: Tensor | None
    ends: Tensor | None
    is_underdamped: Tensor | None = None


def scan_reference(options: Options, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the scan by a loop over the samples; return the outputs (batch, T, output_size), and the final v and x.

    ``tensors`` are the attributes of :class:`ScanInput`. v and x are those after the last sample of each sequence.
    """
    inputs, (kind, is_held) = ScanInput(*tensors), options
    v, x, dtype = inputs.v0, inputs.x0, inputs.v0.dtype
    samples = inputs.x.to(dtype)
    if inputs.gaps is None:
        steps = [tuple(inputs.rates.to(dtype))] * samples.shape[1]
    else:
        dt = inputs.gaps.to(inputs.rates.dtype).unsqueeze(-1)
        entries = transition(kind, is_held, inputs.rates, dt)
        if inputs.is_underdamped is not None:
            rotations = transition("rotation", is_held, inputs.rates, dt)
            pairs = zip(rotations, entries, strict=True)
            entries = tuple(torch.where(inputs.is_underdamped, one, other) for one, other in pairs)
        steps = list(zip(*(entry.to(dtype).unbind(1) for entry in entries), strict=True))
    states = []
    for u, (vv, vx, xv, xx, *f) in zip((samples @ inputs.w.T).unbind(1), steps, strict=True):
        v, x = vv * v + vx * x, xv * v + xx * x
        v, x = (v + f[0] * u, x + f[1] * u) if f else (v + u, x)
        states.append(torch.cat([v, x], -1))
    path = torch.stack(states, 1)
    y = path @ inputs.c.T
    y = y if inputs.d is None else y + samples @ inputs.d.T
    if inputs.ends is not None:
        last = path.gather(1, inputs.ends.view(-1, 1, 1).expand(-1, 1, path.shape[-1]))[:, 0]
        v, x = last.chunk(2, -1)
    return y.to(_output_dtype(inputs)), v, x


def _output_dtype(inputs: ScanInput) -> torch.dtype:
    return inputs.x.dtype if inputs.x.dtype.itemsize < inputs.v0.dtype.itemsize else inputs.v0.dtype


def scan(kind: str, is_held: bool, inputs: ScanInput) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of :func:`scan_reference`, computed by the fused implementation if it supports the inputs.

    Underdamped oscillators are scanned in normal coordinates, in which a transition is a rotation and a decay.
    """
    is_compiled = torch.compiler.is_compiling() and not _torch.is_transformed()
    run: Any = _compiled_scan if is_compiled else fast_scan
    if kind != "exact" or inputs.gaps is None or (not is_compiled and _torch.needs_reference()):
        return run((kind, is_held), *inputs)
    rates, to, back, is_underdamped = _normal_coordinates(is_held, inputs.rates, inputs.v0.dtype)
    v0, x0 = _product(to, inputs.v0, inputs.x0)
    c = torch.cat(_product(_transposed(back), *inputs.c.chunk(2, 1)), 1)
    inputs = inputs._replace(v0=v0, x0=x0, c=c, rates=rates, is_underdamped=is_underdamped)
    y, p, q = run((kind, is_held), *inputs)
    return y, *_product(back, p, q)


def _normal_coordinates(is_held: bool, rates: Tensor, dtype: torch.dtype) -> tuple[Tensor, Entries, Entries, Tensor]:
    r"""Return the rates of oscillators in normal coordinates, the linear map T to these coordinates, and its inverse.

    For x'' + γ x' + κ x = 0 with v = x', let a = γ/2, ω = √(κ - a²) and λ = -a + iω. The normal coordinates
    (p, q) = T (v, x) are chosen such that z = p + iq follows z' = λz. For impulses they are

    .. math:: p = v + a x, \qquad q = \omega x,

    so that an impulse on v is an impulse on p. For held inputs they are

    .. math:: p = -a v - \kappa x, \qquad q = \omega v,

    so that an input u that is held over the gap Δ adds (e^{λΔ} - 1) u to z. With both, rounding errors are small
    relative to the energy v² + κx². ``rates`` holds γ and κ, and ``is_held`` is whether the input is held.

    Returns:
        The rates (2, P), which are a and ω if an oscillator is underdamped, and γ and κ otherwise; the four entries of
        T, (P,) each; the four entries of T⁻¹; and the mask (P,) of underdamped oscillators. For the other oscillators T
        is the identity.
    """
    gamma, kappa = rates
    is_underdamped = gamma.square() < 3.0 * kappa  # close to critical damping ω would be inaccurate
    a, kappa = gamma / 2, torch.where(is_underdamped, kappa, 1.0)
    omega = torch.where(is_underdamped, kappa - a.square(), 1.0).sqrt()
    one, zero, slope = torch.ones_like(a), torch.zeros_like(a), a / omega
    if is_held:
        rows = [-a, -kappa, omega, zero, zero, 1 / omega, -1 / kappa, -slope / kappa]
    else:
        rows = [one, a, zero, omega, one, -slope, zero, 1 / omega]
    identity = torch.stack([one, zero, zero, one] * 2)
    matrices = torch.where(is_underdamped, torch.stack(rows), identity).to(dtype).unbind()
    rates = torch.where(is_underdamped, torch.stack([a, omega]), rates)
    return rates, matrices[:4], matrices[4:], is_underdamped


def _product(matrix: Entries, one: Tensor, other: Tensor) -> Pair:
    """Multiply each of P 2 × 2 matrices with n vectors.

    ``matrix`` holds the four entries of the matrices, (P,) each. ``one`` and ``other`` are the two components of the
    vectors, (n, P) each. Return the two components of the products.
    """
    a, b, c, d = matrix
    return a * one + b * other, c * one + d * other


def _transposed(matrix: Entries) -> Entries:
    a, b, c, d = matrix[:4]
    return a, c, b, d


# The fused implementation processes one segment of samples at a time, so that intermediate values stay in the cache. A
# segment has ``chunks`` chunks of ``steps`` samples each, and operations work on tensors (batch, chunks * P). The scan
# of a segment has three passes. The first runs all chunks in parallel from zero states. The second computes the states
# between chunks sequentially. The third runs all chunks in parallel from these states. The inputs and the states
# between chunks are saved for backward; everything else is recomputed, segment by segment.


class _Segment(NamedTuple):
    """A segment of the series. It begins at sample ``start`` and consists of ``chunks`` chunks of ``steps`` samples."""

    start: int
    steps: int
    chunks: int

    def view(self, z: Tensor) -> Tensor:
        """Return the segment of a tensor (batch, T, ...) as a view (steps, batch, chunks, ...)."""
        part = z[:, self.start : self.start + self.steps * self.chunks].unflatten(1, (self.chunks, self.steps))
        return part.movedim(2, 0)

    def rows(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the segment of a tensor (batch, T, n) as a matrix (steps * batch * chunks, n)."""
        return self.view(z).to(dtype).reshape(-1, z.shape[-1])

    def end_indices(self, ends: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the mask (batch, 1) of sequences that end in the segment, and the indices of their last samples.

        ``ends`` (batch,) holds the index of the last sample of each sequence in the whole series. The returned indices
        select these samples from a tensor that :meth:`view` returns.
        """
        at, size = ends - self.start, self.steps * self.chunks
        is_here, at = (at >= 0) & (at < size), at.clamp(0, size - 1)
        return is_here.unsqueeze(1), (at % self.steps, torch.arange(len(at), device=at.device), at // self.steps)


def _segments(inputs: ScanInput) -> list[_Segment]:
    (batch, length, _), size = inputs.x.shape, inputs.v0.shape[1]
    row, root = max(1, batch * size), math.isqrt(length)
    if inputs.x.device.type == "cpu":
        chunks = max(1, _OPERATION_SIZE // row)
        steps = min(_CHUNK_STEPS, root) if chunks > 1 else min(length, _SEGMENT_SIZE // row)
    else:  # on a GPU, launching a kernel is expensive and access to memory is fast
        chunks, steps = length, root
    steps = max(_SHORTEST_CHUNK, steps)
    found, start = [], 0
    while length - start >= steps:
        found.append(_Segment(start, steps, min(chunks, (length - start) // steps)))
        start += steps * found[-1].chunks
    return found if start == length else [*found, _Segment(start, length - start, 1)]


class _Oscillators:
    """The group of all oscillators in a scan that have the same kind of transition, and the gradients of their rates.

    The gradients are summed over the segments of the scan.
    """

    def __init__(self, kind: str, is_held: bool, inputs: ScanInput, index: Any) -> None:
        self.kind, self.is_held, self.index, self.inputs = kind, is_held, index, inputs
        self.dtype = inputs.v0.dtype
        # With strong damping the entries and their gradients are small differences, which need a wider dtype
        self.wide = inputs.rates.dtype if kind == "exact" and inputs.gaps is not None else self.dtype
        self.rates, self.w = inputs.rates[:, index], inputs.w[index]
        self.c = tuple(part[:, index] for part in inputs.c.chunk(2, 1))
        self.size = len(self.w)
        self.drates, self.dw = torch.zeros_like(self.rates), torch.zeros_like(self.w)
        self.dc = tuple(torch.zeros_like(part) for part in self.c)

    def transitions(self, segment: _Segment, with_vjp: bool = False) -> tuple[Entries, Entries]:
        """Return the entries of the transition of each step, and of the product of all transitions of each chunk.

        The entries of steps have the shape (steps, 1 or batch, chunks * size). The four entries of products have the
        shape (1 or batch, chunks, size). ``with_vjp`` stores what :meth:`add_rates` needs.
        """
        dtype, gaps = self.dtype, self.inputs.gaps
        if gaps is None:
            row = self.rates.to(dtype).repeat(1, segment.chunks)
            power = torch.linalg.matrix_power(self.rates[:4].T.unflatten(1, (2, 2)), segment.steps)
            carries: Entries = tuple(each.expand(1, segment.chunks, -1) for each in power.flatten(1).T.to(dtype))
            return tuple(entry.expand(segment.steps, 1, -1) for entry in row), carries
        self.gaps = segment.view(gaps).to(self.wide).contiguous().unsqueeze(-1)
        if self.kind == "rotation":
            entries = transition("rotation", self.is_held, self.rates.to(dtype), self.gaps)
            (a, omega), total = self.rates, self.gaps.to(self.rates.dtype).sum(0)
            phase = total * omega
            phase = (phase - (phase / (2 * math.pi)).round() * (2 * math.pi)).to(dtype)
            fall = (total * -a).to(dtype).exp()
            c, s = fall * phase.cos(), fall * phase.sin()
            carries = (c, -s, s, c)
        else:
            compute = functools.partial(transition, self.kind, self.is_held)
            if with_vjp:  # autograd is disabled in custom operators of torch.library
                found: Any = torch.func.vjp(compute, self.rates.to(self.wide), self.gaps)
                entries, self.vjp = found
            else:
                entries = compute(self.rates.to(self.wide), self.gaps)
            if self.kind == "exact":
                carries = transition("exact", False, self.rates, self.gaps.sum(0))
            else:
                carries = tuple(_chunk_products(torch.stack(entries[:4])))
            carries = tuple(carry.to(dtype) for carry in carries)
        return tuple(entry.to(dtype).flatten(2) for entry in entries), carries

    def increments(self, u: Tensor, entries: Entries) -> Pair:
        """Return the amounts f_t W s_t that the samples s_t add to v and to x, given u = W s_t for all samples."""
        if self.is_held:
            return u * entries[4], u * entries[5]
        return u, u.new_zeros(1, 1, u.shape[2]).expand(len(u), 1, -1)

    def add_rates(self, entries: Entries, states: Pair, u: Tensor, grads: Pair, wants_gaps: bool) -> Tensor | None:
        """Add the gradient of the rates, from one segment, to ``self.drates``.

        If ``wants_gaps``, return the gradient of the segment's gaps; otherwise return None.
        ``states`` holds v and x before the first step and after each step, (steps + 1, batch, chunks * size). ``grads``
        holds the gradients with respect to v and x after each step. ``u`` is W s_t for all samples s_t.
        """
        v, x = states
        gv, gx = grads
        shape = (*u.shape[:2], -1, self.size)
        if self.kind == "rotation":  # z = e^{λΔ} z₀ has the gradients -Δ Re(ḡz) for a, Δ Im(ḡz) for ω
            p, q = (v[1:] + u if self.is_held else v[1:] - u), x[1:]
            along, across = (gv * p).addcmul_(gx, q), (gx * p).addcmul_(gv, q, value=-1)
            weights = self.gaps.expand(*shape[:2], *self.gaps.shape[2:]).reshape(1, -1)
            for total, sign, part in zip(self.drates, (-1, 1), (along, across), strict=True):
                total.add_((weights @ part.view(-1, self.size))[0], alpha=sign)
            if not wants_gaps:
                return None
            a, omega = self.rates.to(self.dtype)
            return (across.view(shape) * omega - along.view(shape) * a).sum(-1, keepdim=True)
        v, x, u, gv, gx = [z.to(self.wide) for z in (v[:-1], x[:-1], u, gv, gx)]
        factors = [(gv, v), (gv, x), (gx, v), (gx, x), (gv, u), (gx, u)][: len(entries)]
        sizes = (1, 1, 1) if self.inputs.gaps is None else self.gaps.shape[:3]
        products = tuple((one * other).view(shape).sum_to_size(*sizes, self.size) for one, other in factors)
        if self.inputs.gaps is None:
            self.drates += torch.cat(products).view(self.drates.shape)
            return None
        drates, dgaps = self.vjp(products)
        self.drates += drates
        return dgaps


def _oscillators(options: Options, inputs: ScanInput) -> list[_Oscillators]:
    """Divide the oscillators of a scan into groups with the same kind of transition; return the list of the groups."""
    if inputs.is_underdamped is None:
        return [_Oscillators(*options, inputs, slice(None))]
    masks = {"rotation": inputs.is_underdamped, options[0]: ~inputs.is_underdamped}
    found = [(kind, mask.nonzero()[:, 0]) for kind, mask in masks.items()]
    size = inputs.rates.shape[1]
    return [
        _Oscillators(kind, options[1], inputs, slice(None) if len(index) == size else index)
        for kind, index in found
        if len(index)
    ]


def _chunk_products(matrices: Tensor) -> Tensor:
    """Return the product A_n ... A_2 A_1 of n 2 × 2 matrices.

    ``matrices`` (4, n, ...) holds the entries of A_1, ..., A_n. The result (4, ...) holds the entries of the product.
    """
    while matrices.shape[1] > 1:
        even = matrices.shape[1] // 2 * 2
        first, second, rest = matrices[:, :even:2], matrices[:, 1:even:2], matrices[:, even:]
        (a, b, c, d), (e, f, g, h) = second, first
        both = torch.stack([a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h])
        matrices = torch.cat([both, rest], 1)
    return matrices[:, 0]


def _pairs(states: Sequence[Tensor]) -> list[Pair]:
    return list(zip(states[0].unbind(), states[1].unbind(), strict=True))


def _recur(rows: Sequence[Entries], inputs: Sequence[Pair], states: Sequence[Pair]) -> None:
    """Compute h_i = M_i h_{i-1} + b_i for i = 1, 2, ..., and write the results into ``states``.

    ``states`` is the list h_0, h_1, ...; all except h_0 are overwritten. ``rows`` is the list of the entries of
    M_1, M_2, ..., and ``inputs`` is the list b_1, b_2, .... b_i and h_i may share memory.
    """
    for (vv, vx, xv, xx), (bv, bx), (v, x), (v1, x1) in zip(rows, inputs, states, states[1:], strict=False):
        torch.addcmul(bv, vv, v, out=v1).addcmul_(vx, x)
        torch.addcmul(bx, xv, v, out=x1).addcmul_(xx, x)


def _starts(
    rows: Sequence[Entries], inputs: Sequence[Pair], start: Sequence[Tensor], carries: Entries, order: int = 1
) -> Sequence[Tensor]:
    """Return v and x of P oscillators at the starts of all chunks, (batch, chunks * P) each.

    ``start`` is the pair v, x at the start of the first chunk, (batch, P) each. ``inputs`` holds what each step adds to
    v and x, and ``rows`` holds the entries of the transition of each step except the first, both for all chunks.
    ``carries`` holds the entries of the product of all transitions in a chunk, (1 or batch, chunks, P). With
    ``order=-1`` the recurrence runs from the last chunk to the first.
    """
    if carries[0].shape[1] == 1:
        return start
    spare = [tuple(torch.empty_like(inputs[0][0]) for _ in range(2)) for _ in range(2)]
    states: Any = [inputs[0], *(spare[i % 2] for i in range(len(rows)))]
    _recur(rows, inputs[1:], states)
    ends = [end.view(len(start[0]), carries[0].shape[1], -1) for end in states[-1]]
    v, x = start
    found = [(v, x)]
    chunks = list(zip(*[z.unbind(1) for z in (*ends, *carries)], strict=True))
    for end_v, end_x, vv, vx, xv, xx in chunks[::order]:
        v, x = torch.addcmul(end_v, vv, v).addcmul_(vx, x), torch.addcmul(end_x, xv, v).addcmul_(xx, x)
        found.append((v, x))
    found = found[:-1][::order]
    return torch.stack([v for v, _ in found], 1).flatten(1), torch.stack([x for _, x in found], 1).flatten(1)


def _forward(options: Options, keep: bool, *tensors: Any) -> tuple[Any, tuple[Tensor]]:
    """Compute the scan segment by segment; return the results of :func:`scan_reference`, and residuals for backward.

    The residuals are the states at the starts of chunks. For 1,024 samples this function is 33 times as fast as
    :func:`scan_reference`; benchmarks/oscillators.py measures both in its rows "own" and "loop".
    """
    inputs = ScanInput(*tensors)
    x, d, dtype = inputs.x, inputs.d, inputs.v0.dtype
    _torch.keep_freed_memory(x.device)
    (batch, length, _), segments = x.shape, _segments(inputs)
    y = x.new_empty(batch, length, len(inputs.c), dtype=_output_dtype(inputs))
    starts = inputs.v0.new_empty(2, batch, sum(segment.chunks for segment in segments), inputs.v0.shape[1])
    state = torch.stack([inputs.v0, inputs.x0])
    end = state.clone()
    chunk = 0
    groups = _oscillators(options, inputs)
    for segment in segments:
        rows = segment.rows(x, dtype)
        out = rows.new_zeros(len(rows), len(inputs.c)) if d is None else rows @ d.T
        shape = (segment.steps, batch, segment.chunks, -1)
        for group in groups:
            entries, carries = group.transitions(segment)
            matrices = list(zip(*map(Tensor.unbind, entries[:4]), strict=True))
            b = _pairs(group.increments((rows @ group.w.T).view(segment.steps, batch, -1), entries))
            before = state[..., group.index].unbind()
            path = _path(matrices, b, _starts(matrices[1:], b, before, carries))
            for i, z in enumerate(path):
                out.addmm_(z[1:].view(-1, group.size), group.c[i].T)
                starts[i, :, chunk : chunk + segment.chunks, group.index] = z[0].view(shape[1:])
                state[i, :, group.index] = z[-1].view(shape[1:])[:, -1]
                if inputs.ends is not None:
                    is_here, at = segment.end_indices(inputs.ends)
                    end[i, :, group.index] = torch.where(is_here, z[1:].view(shape)[at], end[i, :, group.index])
        segment.view(y).copy_(out.view(shape))
        chunk += segment.chunks
    v, q = (state if inputs.ends is None else end).unbind()
    return (y, v.clone(), q.clone()), (starts,)


def _path(matrices: Sequence[Entries], b: Sequence[Pair], start: Sequence[Tensor]) -> Pair:
    """Run all chunks of a segment from their start states; return v and x at the starts and after each step.

    v and x are (steps + 1, batch, chunks * P) each. ``start`` is the pair v, x at the starts of the chunks.
    ``matrices`` holds the entries of the transition of each step, and ``b`` holds what each step adds to v and x.
    """
    v, x = (z.new_empty(len(matrices) + 1, len(z), b[0][0].shape[1]) for z in start)
    v[0], x[0] = start
    _recur(matrices, b, _pairs((v, x)))
    return v, x


def _vjp(
    options: Options, tensors: Sequence[Any], residuals: Sequence[Tensor], grads: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the VJP of the scan, from the last segment to the first.

    ``residuals`` holds the states at the starts of chunks. ``grads`` holds the gradients with respect to the outputs,
    some of which may be None. The result has an entry for each field of :class:`ScanInput`: the gradient if it is
    ``needed``, and None otherwise.
    """
    inputs, (starts,) = ScanInput(*tensors), residuals
    wants: Any = ScanInput(*needed)  # type: ignore[arg-type]  # one bool for each field
    x, d, dtype = inputs.x, inputs.d, inputs.v0.dtype
    dy = x.new_zeros(1, 1, 1).expand(*x.shape[:2], len(inputs.c)) if grads[0] is None else grads[0]
    dend = torch.stack([torch.zeros_like(inputs.v0) if grad is None else grad for grad in grads[1:]])
    after = dend.clone() if inputs.ends is None else torch.zeros_like(dend)
    dx = torch.empty_like(x) if wants.x else None
    dgaps = torch.zeros_like(inputs.gaps) if inputs.gaps is not None and wants.gaps else None
    dd = None if d is None else torch.zeros_like(d)
    groups, chunk = _oscillators(options, inputs), starts.shape[2]
    for segment in reversed(_segments(inputs)):
        chunk -= segment.chunks
        rows, dout = segment.rows(x, dtype), segment.rows(dy, dtype)
        drows = None if dx is None else torch.zeros_like(rows) if d is None else dout @ d
        for group in groups:
            start = starts[:, :, chunk : chunk + segment.chunks, group.index].flatten(2).unbind()
            du = _segment_vjp(group, segment, rows, dout, start, after, dend, wants, dgaps)
            if drows is not None:
                drows.addmm_(du, group.w)
        if dx is not None and drows is not None:
            segment.view(dx).copy_(drows.view(segment.steps, len(dx), segment.chunks, -1))
        if dd is not None:
            dd.addmm_(dout.T, rows)
    dw, dc, drates = torch.empty_like(inputs.w), torch.empty_like(inputs.c), torch.empty_like(inputs.rates)
    for group in groups:
        dw[group.index], drates[:, group.index] = group.dw, group.drates
        for part, dpart in zip(dc.chunk(2, 1), group.dc, strict=True):
            part[:, group.index] = dpart
    every = (dx, after[0].clone(), after[1].clone(), dw, dc, dd, drates, dgaps, None, None)
    return tuple(grad if is_needed else None for grad, is_needed in zip(every, needed, strict=True))


def _segment_vjp(
    group: _Oscillators,
    segment: _Segment,
    rows: Tensor,
    dout: Tensor,
    start: Sequence[Tensor],
    after: Tensor,
    dend: Tensor,
    wants: Any,
    dgaps: Tensor | None,
) -> Tensor:
    """Compute the VJP of one segment for a group of oscillators; return the gradient of the products W s_t.

    The gradients of the rates are added to ``group``, and those of the gaps to ``dgaps``.
    ``rows`` holds the samples, ``dout`` the gradients of the outputs, and ``start`` the states at the starts of chunks.
    ``after`` is the gradient of the states after the segment. It is overwritten by the gradient of the states before
    the segment. ``dend`` is the gradient of the last states of the sequences. ``wants`` holds a bool for each field of
    :class:`ScanInput`: whether its gradient is needed.
    """
    batch, ends = after.shape[1], group.inputs.ends
    shape = (segment.steps, batch, segment.chunks, -1)
    entries, carries = group.transitions(segment, with_vjp=wants.rates or wants.gaps)
    matrices = list(zip(*map(Tensor.unbind, entries[:4]), strict=True))
    u = (rows @ group.w.T).view(segment.steps, batch, -1)
    path = _path(matrices, _pairs(group.increments(u, entries)), start)
    # Gradients of the states before the first step and after each step, by the transposed recurrence
    dpath = path[0].new_zeros(2, segment.steps + 1, batch, u.shape[2])
    for i, z in enumerate(path):
        group.dc[i].addmm_(dout.T, z[1:].view(-1, group.size))
        torch.mm(dout, group.c[i], out=dpath[i, 1:].view(-1, group.size))
        if ends is not None:
            is_here, at = segment.end_indices(ends)
            ended = torch.where(is_here, dend[i][:, group.index], 0.0)
            dpath[i, 1:].view(shape).index_put_(at, ended, accumulate=True)
    back = [_transposed(matrix) for matrix in reversed(matrices)]
    states = _pairs(dpath.unbind())[::-1]
    last = _starts(back, states, after[..., group.index].unbind(), _transposed(carries), order=-1)
    for z, dz in zip(states[0], last, strict=True):
        z.add_(dz)
    _recur(back, states[1:], states)
    after[..., group.index] = dpath[:, 0].view(2, *shape[1:])[:, :, 0]
    dpair = dpath[0, 1:], dpath[1, 1:]
    if wants.rates or wants.gaps:
        found = group.add_rates(entries, path, u, dpair, wants.gaps)
        if dgaps is not None and found is not None:
            view = segment.view(dgaps)
            view += found.squeeze(-1).sum_to_size(view.shape).to(view.dtype)
    du = (dpair[0] * entries[4]).addcmul_(dpair[1], entries[5]) if group.is_held else dpair[0]
    du = du.view(-1, group.size)
    group.dw.addmm_(du.T, rows)
    return du


fast_scan = _torch.fast_form(scan_reference, _vjp)(_forward)


# torch.compile needs residuals whose shape depends only on the length of the series, so they are padded.


def _padded_forward(options: Options, keep: bool, *tensors: Any) -> tuple[Any, tuple[Tensor]]:
    outputs, (starts,) = _forward(options, keep, *tensors)
    spare = tensors[0].shape[1] // _SHORTEST_CHUNK + 1 - starts.shape[2]
    return outputs, (functional.pad(starts, (0, 0, 0, spare)) if keep else starts.new_empty(0),)


def _fake_forward(options: Options, keep: bool, *tensors: Any) -> tuple[Any, tuple[Tensor]]:
    inputs = ScanInput(*tensors)
    (batch, length, _), state = inputs.x.shape, inputs.v0
    y = state.new_empty(batch, length, len(inputs.c), dtype=_output_dtype(inputs))
    shape = (2, *state.shape[:1], length // _SHORTEST_CHUNK + 1, *state.shape[1:]) if keep else (0,)
    return (y, state.new_empty(state.shape), state.new_empty(state.shape)), (state.new_empty(shape),)


def _padded_vjp(
    options: Options, tensors: Sequence[Any], residuals: Sequence[Tensor], grads: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    (starts,), inputs = residuals, ScanInput(*tensors)
    if starts.numel():
        starts = starts[:, :, : sum(segment.chunks for segment in _segments(inputs))]
    else:  # the forward pass saved no residuals
        (starts,) = _forward(options, True, *tensors)[1]
    return _vjp(options, tensors, (starts,), grads, needed)


_compiled_scan = _torch.operator_form(
    "oscillators",
    "str kind, bool is_held, ",
    "Tensor x, Tensor v0, Tensor x0, Tensor w, Tensor c, Tensor? d, Tensor rates, Tensor? gaps, Tensor? ends, "
    "Tensor? is_underdamped",
    (3, 1),
    _padded_forward,
    _fake_forward,
    _padded_vjp,
)
