r"""The exact step of x'' + γ x' + κ x = u over a gap, for any γ, κ >= 0.

With a = γ/2 and z = (κ - a²)Δ², the functions c = cos √z and s = sin √z / √z are entire: there is no corner at
critical damping. Near z = 0 they are summed as series. Where the oscillator is overdamped, e^{-aΔ} goes into the
exponentials, which then cannot overflow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Number = float | Tensor

_TERMS = 10  # of the series where |z| <= 1: the next is below 1e-19
_HELD_TERMS = 26  # of the series of the held input, where γΔ <= 1.5: likewise


class OscillatorStep(NamedTuple):
    """The four entries of Φ, for the state (v, x): v' = vv v + vx x, x' = xv v + xx x."""

    vv: Tensor
    vx: Tensor
    xv: Tensor
    xx: Tensor


class Waves(NamedTuple):
    """C = e^{-aΔ} c, S = Δ e^{-aΔ} s and Q = Δ³ e^{-aΔ} (c - s)/z; ∂S/∂κ = Q/2 and ∂C/∂κ = -ΔS/2 at constant a."""

    c: Tensor
    s: Tensor
    q: Tensor | None


def oscillator_step(damping: Number, stiffness: Number, dt: Number) -> OscillatorStep:
    r"""The exact step of damped oscillators over a time without input.

    The oscillator x'' + γ x' + κ x = 0 has the state (v, x) with v = x'. After a time Δ the state is Φ(Δ)(v, x), with
    a = γ/2, z = (κ - a²)Δ², c = cos √z and s = sin √z / √z:

    .. math:: \Phi(\Delta) = e^{-a\Delta}
        \begin{pmatrix} c - a\Delta s & -\kappa\Delta s \\ \Delta s & c + a\Delta s \end{pmatrix}.

    It holds for underdamped, critical and overdamped oscillators, for γ = 0 and for κ = 0, and is smooth between them.
    The function is differentiable any number of times with respect to every argument.

    Arguments:
        damping: γ, in 1 / time; broadcast with the other arguments.
        stiffness: κ, in 1 / time².
        dt: Δ, the time, not negative.

    Returns:
        The entries ``vv``, ``vx``, ``xv``, ``xx`` of Φ, a named tuple.

    Example:
        >>> import hbnode
        >>> step = hbnode.nn.functional.oscillator_step(0.0, 1.0, 3.141592653589793 / 6)  # a twelfth of a period
        >>> [round(float(entry), 4) for entry in step]
        [0.866, -0.5, 0.5, 0.866]
    """
    gamma, kappa, dt = as_tensors(damping, stiffness, dt)
    a = gamma / 2
    waves = any_waves(a, kappa, dt)
    product = a * waves.s
    return OscillatorStep(waves.c - product, -kappa * waves.s, waves.s, waves.c + product)


def held_response(damping: Number, stiffness: Number, dt: Number) -> tuple[Tensor, Tensor]:
    r"""What an input of 1, held for a time Δ, adds to v and x: :math:`F_v` and :math:`F_x`.

    With Φ of :func:`oscillator_step`, :math:`F_v = \Phi_{xv}` and :math:`F_x = (1 - \Phi_{xx})/\kappa`. The second
    loses its digits for small κ. There it is the series :math:`F_x = \Delta^2 \sum_{n \ge 2} c_n`, c₁ = 0, c₂ = 1/2,
    :math:`c_{n+2} = -((n+1)\gamma\Delta c_{n+1} + \kappa\Delta^2 c_n)/((n+1)(n+2))`, or, overdamped,
    :math:`\Delta(\varphi_1(\lambda_+\Delta) - \varphi_1(\lambda_-\Delta))/(\lambda_+ - \lambda_-)` with
    :math:`\varphi_1(y) = (e^y - 1)/y`.

    Arguments:
        damping: γ, in 1 / time; broadcast with the other arguments.
        stiffness: κ, in 1 / time².
        dt: Δ, the time, not negative.
    """
    gamma, kappa, gap = torch.broadcast_tensors(*as_tensors(damping, stiffness, dt))
    step = oscillator_step(gamma, kappa, gap)
    drag, pull = gamma * gap, kappa * gap.square()
    is_slow = (drag > 1.5) & (pull < 0.1875 * drag.square())  # overdamped, with rates well apart
    is_stiff = ~is_slow & (pull > 0.4)
    direct = (1 - step.xx) / torch.where(is_stiff, kappa, 1.0)
    series = gap.square() * _held_series(torch.where(is_stiff | is_slow, 0.0, drag), torch.where(is_stiff, 0.0, pull))
    a = torch.where(is_slow, drag / 2, 2.0)
    pull = torch.where(is_slow, pull, 1.0)
    root = (a.square() - pull).sqrt()
    slow, fast = -pull / (a + root), -(a + root)
    overdamped = gap.square() * (_phi1(slow) - torch.expm1(fast) / fast) / (2 * root)
    return step.xv, torch.where(is_stiff, direct, torch.where(is_slow, overdamped, series))


def as_tensors(*values: Number) -> tuple[Tensor, ...]:
    """Numbers as tensors of the dtype and on the device of the tensors among them; in float64 if there are none."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    shaped = [each for each in tensors if each.dim()]
    like = (shaped or tensors)[0] if tensors else None
    dtype = torch.float64
    if tensors:
        dtype = tensors[0].dtype
        for each in tensors[1:]:
            dtype = torch.promote_types(dtype, each.dtype)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    device = None if like is None else like.device
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device=device)
        for value in values
    )


def any_waves(a: Tensor, kappa: Tensor, dt: Tensor, *, with_q: bool = False) -> Waves:
    """C, S and Q in every regime, broadcast; by operations that autograd knows."""
    difference = kappa - a.square()
    z, drag = difference * dt.square(), a * dt
    is_over, is_near = z < -1.0, z.abs() <= 1.0
    small = torch.where(is_near, z, 0.0)
    root = torch.where(is_near, 1.0, z.abs()).sqrt()
    # -a + √(a² - κ) without cancellation
    slow = torch.where(is_over, -(kappa * dt.square()) / (drag + root), -drag).exp()
    fast = torch.where(is_over, -drag - root, -drag).exp()
    wave = torch.where(is_over, 0.0, root)
    c = torch.where(is_over, (slow + fast) / 2, slow * torch.where(is_near, _cosine(small), wave.cos()))
    sine = torch.where(is_over, (slow - fast) / 2, slow * wave.sin()) / root
    s = dt * torch.where(is_near, slow * _sine(small), sine)
    if not with_q:
        return Waves(c, s, None)
    away = (dt * c - s) / torch.where(is_near, 1.0, difference)
    return Waves(c, s, torch.where(is_near, dt**3 * slow * _third(small), away))


def _cosine(z: Tensor) -> Tensor:
    """Cos √z."""
    return _polynomial(z, [(-1.0) ** n / math.factorial(2 * n) for n in range(_TERMS)])


def _sine(z: Tensor) -> Tensor:
    """Sin √z / √z."""
    return _polynomial(z, [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(_TERMS)])


def _third(z: Tensor) -> Tensor:
    """(cos √z - sin √z / √z) / z."""
    return _polynomial(z, [(-1.0) ** n * 2 * n / math.factorial(2 * n + 1) for n in range(1, _TERMS + 1)])


def _polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    value = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * z + coefficient
    return value


def _phi1(y: Tensor) -> Tensor:
    """(e^y - 1) / y, 1 at y = 0."""
    is_small = y.abs() < 1e-3
    series = _polynomial(torch.where(is_small, y, 0.0), [1 / math.factorial(n + 1) for n in range(6)])
    away = torch.where(is_small, 1.0, y)
    return torch.where(is_small, series, torch.expm1(away) / away)


def _held_series(drag: Tensor, pull: Tensor) -> Tensor:
    """F_x / Δ² by its series, from γΔ and κΔ²."""
    before, here = torch.zeros_like(drag), torch.full_like(drag, 0.5)
    total = here
    for n in range(1, _HELD_TERMS):
        before, here = here, -((n + 1) * drag * here + pull * before) / ((n + 1) * (n + 2))
        total = total + here
    return total
