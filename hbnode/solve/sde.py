"""Solvers for heavy-ball SDEs with fixed steps: :func:`hbnode.sdeint`, its native methods, and their noise.

The native methods use the time loop and the gradient modes of the ODE solvers.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hbnode._checks import as_seed, check_input, nearest
from hbnode._torch import to_numpy, untraced
from hbnode._tree import Times
from hbnode.errors import ReversalError, SolverError
from hbnode.fields import HeavyBallSDE, diffusion
from hbnode.nfe import NFE, Tally
from hbnode.solve import torchsde
from hbnode.solve.adjoints import Checkpoint, Direct, Reversible, gradient_mode
from hbnode.solve.grid import Grid
from hbnode.solve.methods import ALL_METHODS, METHODS, RADIUS, RHS, Method, Rows, StepResult, phi_functions
from hbnode.solve.odeint import check_resolution, checked_state, checked_times, count_samples, run
from hbnode.solve.settings import Gradient, Settings
from hbnode.solve.stepper import Attempt, Setup, Stepper
from hbnode.solve.term import ODETerm, change_of_call, snapshot_of, unwrap_compiled
from hbnode.solve.torchsde import TorchsdeMethod

NativeSDEMethod = Literal["ubu", "baoab", "nystrom4"]
SDEMethodName = Literal[NativeSDEMethod, TorchsdeMethod]

MOST_ROUNDING = 1e-4  # largest relative rounding error of a state that reversed steps reconstruct
ROUNDING = 1e-2  # a step may be longer than dt by this fraction, because times are rounded
MOST_STEPS = 10_000_000
TINY = 1e-30  # a tiny step size that replaces 0, at which square roots have infinite gradients
BRIDGE = (1.0, 1 / 12, 1 / 720)  # variances of W, L and K of ShiftedNystrom for a step of size 1
LOW = 0xFFFFFFFF  # mask of the low 32 bits
NO_SDE = "sde must be a HeavyBallSDE, got {}. Fix: hbnode.HeavyBallSDE(func)."

Noise = Callable[[int], Tensor]  # maps the index of a step to its standard normal variables, (normals, ...)


# The linear part


def linear_part(damping: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Return the coefficients a, b, p, q, r of the exact linear part of a step.

    The linear part is :math:`dh = m\,dt,\; dm = -\gamma m\,dt + s\,dW` with the noise scale s, over a time
    :math:`\tau`. Let γ = ``damping``, τ = ``time`` (float64 tensors that broadcast), a = (1 - e^{-γτ})/γ, b = e^{-γτ}
    and z = γτ. The exact solution is

        h ← h + a m + s J,   m ← b m + s I,   I = ∫ e^{-γ(τ-t)} dW,   J = ∫ (1 - e^{-γ(τ-t)})/γ dW.

    The pair (I, J) is Gaussian. It is computed from two independent standard normal variables ξ₁ and ξ₂:

        I = p ξ₁,   J = q ξ₁ + r ξ₂,
        p² = Var I = a (1 + b)/2,   q = p Cov(I, J)/Var I = p a/(1 + b),   r² = Var(J | I) = (z - 2 tanh(z/2))/γ³.

    The formula for r² follows from J = (W - I)/γ and Var(W | I) = τ - a²/Var I = τ - (2/γ) tanh(z/2), where W is the
    increment of the Wiener process. For small z, where the difference in r² cancels, the code computes
    r² = τ³ (φ_2(-z) - 2 φ_3(-z)) / (1 + b) with the functions φ of :class:`~hbnode.solve.methods.Exponential`. It also
    uses a = τ φ_1(-z).
    """
    z = damping * time
    b, phi1, phi2, phi3 = phi_functions(torch, -z, 4)
    a = time * phi1
    p = (a * (1 + b) / 2).sqrt()
    far = torch.where(z < RADIUS, RADIUS, z)
    rest = torch.where(z < RADIUS, (phi2 - 2 * phi3) / (1 + b), (far - 2 * torch.tanh(far / 2)) / far**3)  # r²/τ³
    return a, b, p, p * a / (1 + b), (time**3 * rest).sqrt()


def linear_step(h: Tensor, m: Tensor, linear: Sequence[Tensor], noise: Tensor) -> Rows:
    """Return the position h + a m + j₁ ξ₁ + j₂ ξ₂ and the momentum b m + i ξ₁ after a linear step.

    ``linear`` holds the coefficients a, b, i, j₁ and j₂; ``noise`` holds the standard normal variables ξ₁ and ξ₂. For
    BAOAB, j₂ and ξ₂ are omitted.
    """
    a, b, i, *j = linear
    h = torch.addcmul(h, a, m)
    for weight, normal in zip(j, noise.unbind(0), strict=True):
        h = torch.addcmul(h, weight, normal)
    return h, torch.addcmul(b * m, i, noise[0])


def reverse_linear_step(h: Tensor, m: Tensor, linear: Sequence[Tensor], noise: Tensor) -> Rows:
    a, b, i, *j = linear
    m = torch.addcmul(m, i, noise[0], value=-1) / b
    for weight, normal in zip(j, noise.unbind(0), strict=True):
        h = torch.addcmul(h, weight, normal, value=-1)
    return torch.addcmul(h, a, m, value=-1), m


# The methods


class SDEMethod(Method):
    r"""The base class of methods for :math:`dh = m\,dt,\; dm = (-\gamma m + f(h, t))\,dt + s\,dW`.

    The damping γ and the temperature η affect a step only through its coefficients, so that their gradients are exact.
    The last coefficient is the tensor of standard normal variables of the step.

    Attributes:
        normals: number of standard normal variables per step and element of h.
        reach: largest value of γ times the step size for which the distribution of a step is accurate.
    """

    rows = 2
    normals: ClassVar[int]
    reach = math.inf

    def __init__(self) -> None:
        super().__init__(self.nodes)

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Return the coefficients of a step for each interval between outputs, (coefficients, intervals, ...).

        Arguments:
            gamma: the damping γ, (...).
            scale: the noise scale s, (...).
            size: the step sizes, (intervals, ...).
        """
        raise NotImplementedError

    def compose(self, first: Tensor, second: Tensor, size: Tensor, damping: Tensor) -> Tensor:
        """Return the normal variables of steps of twice the size, (steps, normals, ...).

        ``first`` and ``second`` are the normal variables of the two steps of size ``size`` that form each longer step.
        This implementation is for methods with one linear part per step.
        """
        (a, b, p, q, r), (_, _, whole_p, whole_q, whole_r) = linear_part(damping, size), linear_part(damping, 2 * size)
        i1, i2 = p * first[:, 0], p * second[:, 0]
        xi1 = (b * i1 + i2) / whole_p
        if self.normals == 1:
            return xi1.unsqueeze(1)
        j1, j2 = (q * x[:, 0] + r * x[:, 1] for x in (first, second))
        return torch.stack([xi1, (j1 + a * i1 + j2 - whole_q * xi1) / whole_r], 1)


class UBU(SDEMethod):
    r"""A splitting of strong order 2 that evaluates f once per step.

    A step is a half step of the linear part with noise, an update of the momentum m by f, and another half step of the
    linear part.

    References:
        Sanz-Serna and Zygalakis, Wasserstein distance estimates for the distributions of numerical approximations to
        ergodic stochastic differential equations, Journal of Machine Learning Research (2021).
    """

    nodes, normals = (0.5,), 4

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Return a, b, i, j₁, j₂ of :func:`linear_step` for half a step, and the step size as the factor of f."""
        a, b, p, q, r = linear_part(gamma, size / 2)
        return torch.stack(torch.broadcast_tensors(a, b, scale * p, scale * q, scale * r, size))

    def compose(self, first: Tensor, second: Tensor, size: Tensor, damping: Tensor) -> Tensor:
        compose = super().compose  # the two linear parts of a short step become one linear part of the longer step
        return torch.cat([compose(x[:, :2], x[:, 2:], size / 2, damping) for x in (first, second)], 1)

    def step(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: RHS, **_: Any) -> StepResult:
        (h, m), (*linear, size, noise) = state, coefficients
        h, m = linear_step(h, m, linear, noise[:2])
        m = torch.addcmul(m, size, field(times[0], h))
        return StepResult(linear_step(h, m, linear, noise[2:]))

    def undo(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: RHS) -> Rows:
        (h, m), (*linear, size, noise) = state, coefficients
        h, m = reverse_linear_step(h, m, linear, noise[2:])
        m = torch.addcmul(m, size, field(times[0], h), value=-1)
        return reverse_linear_step(h, m, linear, noise[:2])


class BAOAB(SDEMethod):
    r"""A splitting of strong order 1 and weak order 2 that evaluates f once per step.

    A step consists of half a kick (an update of the momentum m by f), half a drift (an update of the position h),
    damping with noise, half a drift, and half a kick. Among splitting methods, its stationary distribution is closest
    to that of the equation.

    References:
        Leimkuhler and Matthews, Rational construction of stochastic numerical methods for molecular sampling, Applied
        Mathematics Research Express (2012), doi:10.1093/amrx/abs010.
    """

    nodes, normals, is_fsal = (1.0,), 1, True

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Return a, b, i and j₁ of :func:`linear_step` for drifts and damping, and half the step size for the kicks."""
        _, b, p, _, _ = linear_part(gamma, size)
        i = scale * p
        return torch.stack(torch.broadcast_tensors(size * (1 + b) / 2, b, i, size * i / 2, size / 2))

    def step(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: RHS, **_: Any) -> StepResult:
        (h, m, f), (*linear, kick, noise) = state, coefficients
        h, m = linear_step(h, torch.addcmul(m, kick, f), linear, noise)
        f = field(times[0], h)
        return StepResult((h, torch.addcmul(m, kick, f), f))

    def undo(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: RHS) -> Rows:
        (h, m, f), (*linear, kick, noise) = state, coefficients
        h, m = reverse_linear_step(h, torch.addcmul(m, kick, f, value=-1), linear, noise)
        f = field(times[0], h)
        return h, torch.addcmul(m, kick, f, value=-1), f


class ShiftedNystrom(SDEMethod):
    r"""The shifted ODE method with steps of ``"nystrom4"``; strong order 3, three evaluations of f per step.

    Over a step of size H, let W be the increment of the Brownian motion B, and L and K the integrals

        L = (1/H) ∫ (B - tW/H) dt,   K = (1/H²) ∫ (B - tW/H)(H/2 - t) dt.

    W, L and K are independent with variances H, H/12 and H/720. With noise scale s and damping γ, a step is
    m ← m + s(L + 6K), then a step of h'' + γh' = f(h, t) + s(W - 12K)/H, then m ← m - s(L - 6K).

    References:
        Foster, Lyons and Oberhauser, The shifted ODE method for underdamped Langevin MCMC, arXiv:2101.03446.
    """

    ode, is_fsal, normals = METHODS["nystrom4"], True, 3
    nodes = ode.nodes
    reach = 2.0  # for a spring, the stationary variance of h has an error of 0.2 % at 1, 10 % at 2, 83 % at 4

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Return the coefficients of the ODE step, the factors of W and K in f, and the factors of L and K in m.

        The class docstring defines W, K, L and the momentum m.
        """
        gamma, scale, size = torch.broadcast_tensors(gamma, scale, size)
        of_w, of_l, of_k = (scale * (size * variance).sqrt() for variance in BRIDGE)
        noise = torch.stack([of_w / size, -12 * of_k / size, of_l, 6 * of_k])
        return torch.cat([self.ode.packed(torch, gamma, size, error=False), noise])

    def unpack(self, packed: Tensor, dims: int, *, error: bool = False) -> Rows:
        return (*self.ode.unpack(packed[:-4], dims, error=False), *packed[-4:])

    def step(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: RHS, **_: Any) -> StepResult:
        (h, m, f), (*of_ode, by_w, by_k, of_l, of_k, noise) = state, coefficients
        w, bridge, skew = noise.unbind(0)
        shift = by_w * w + by_k * skew

        def shifted(t: Tensor, x: Tensor) -> Tensor:
            nonlocal f  # f without noise, the last entry of the state after the step
            f = field(t, x)
            return f + shift

        start = (h, m + of_l * bridge + of_k * skew, f + shift)
        h, m = self.ode.step(start, tuple(of_ode), times, shifted).state[:2]
        return StepResult((h, m - of_l * bridge + of_k * skew, f))

    def compose(self, first: Tensor, second: Tensor, size: Tensor, damping: Tensor) -> Tensor:
        """Return the normal variables of steps of twice the size, as :meth:`SDEMethod.compose` does.

        They are computed from the integrals p = ∫ B dt and q = ∫ t B dt over the shorter steps.
        """

        def integrals(normals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            w, bridge, skew = (x * (size * v).sqrt() for x, v in zip(normals.unbind(1), BRIDGE, strict=True))
            p = size * (bridge + w / 2)
            return w, p, size * p / 2 - size**2 * (skew - w / 12)

        (w1, p1, q1), (w2, p2, q2) = integrals(first), integrals(second)
        w, p, whole = w1 + w2, p1 + size * w1 + p2, 2 * size
        q = q1 + size * (size * w1 + p2) + size**2 / 2 * w1 + q2
        values = (w, p / whole - w / 2, (whole * p / 2 - q) / whole**2 + w / 12)
        return torch.stack([x / (whole * v).sqrt() for x, v in zip(values, BRIDGE, strict=True)], 1)


NATIVE: dict[str, SDEMethod] = {"ubu": UBU(), "baoab": BAOAB(), "nystrom4": ShiftedNystrom()}
GRADIENTS: dict[str, tuple[Gradient, ...]] = {  # gradient modes that each method supports
    **dict.fromkeys(("ubu", "baoab"), ("direct", "checkpoint", "reversible")),
    "nystrom4": ("direct", "checkpoint"),
    **dict.fromkeys(get_args(TorchsdeMethod), ("direct", "adjoint")),
}


# The steps and the noise


def time_grid(t: Times, dt: Any) -> tuple[Tensor, np.ndarray]:
    """Return the output times, (T,) or (batch, T), in float64 on the CPU, and the steps per interval, (T - 1,).

    The number of steps is the smallest one for which no step of any sample is longer than ``dt``, up to the rounding of
    times.
    """
    step = dt.item() if isinstance(dt, Tensor) and dt.numel() == 1 and not dt.requires_grad else dt
    if not isinstance(step, numbers.Real) or not 0 < float(step) < math.inf:
        raise ValueError(f"dt must be a positive number, got {step!r}. Fix: dt=0.05, for instance.")
    times = checked_times(t, torch.device("cpu"), rows=True)
    if times.requires_grad:
        raise ValueError("t requires a gradient, which sdeint does not compute. Fix: t.detach().")
    values = to_numpy(times)
    backward = np.argwhere(np.diff(values) < 0)
    if len(backward):
        *row, i = backward[0].tolist()
        first, second = (*row, i), (*row, i + 1)
        raise ValueError(
            "t must increase, because an SDE has no solution backward in time, but "
            f"t{list(first)}={values[first]:g} is followed by t{list(second)}={values[second]:g}. Fix: sort the times."
        )
    rows, dt = np.atleast_2d(values), float(step)
    gaps = np.diff(rows)
    span = gaps.max(0, initial=0.0).sum()
    if span / dt > MOST_STEPS:
        raise ValueError(
            f"dt={dt:g} needs {span / dt:.2g} steps for a span of {span:g}; expected at most {MOST_STEPS:,}. "
            f"Fix: dt={2 * span / MOST_STEPS:.1g} or longer, or several solves in sequence."
        )
    is_single = (values == values.astype(np.float32)).all()  # the user's times had float32 precision
    precision = np.finfo(np.float32 if is_single else np.float64).eps
    rounded = np.minimum(precision * np.maximum(abs(rows[:, :-1]), abs(rows[:, 1:])), ROUNDING * dt)
    counts = np.ceil((gaps - rounded) / dt * (1 - 1e-9)).max(0, initial=1.0).astype(int)
    return times.to(torch.float64), counts


def step_sizes(t: Tensor, counts: np.ndarray) -> Tensor:
    """Return the sizes of all steps, (steps,) or (steps, batch).

    ``counts`` holds the number of steps in each interval between two of the times ``t``, (T,) or (batch, T).
    """
    return torch.from_numpy(np.repeat(np.diff(to_numpy(t)).T / counts.reshape(-1, *[1] * (t.dim() - 1)), counts, 0))


def step_seeds(seed: int | None, steps: int) -> np.ndarray:
    """Return a random seed of 63 bits for each step.

    torch's CPU generator uses only the low 32 bits of a seed. These bits are a permutation of the step index, so that
    no two steps have the same bits.
    """
    seed = int(torch.randint(2**62, ())) if seed is None else as_seed(seed)
    low, high = scrambled(np.array([[seed & LOW], [seed >> 32 ^ 0x9E3779B9]], np.uint64))
    mixed = scrambled((scrambled(np.arange(steps, dtype=np.uint64) ^ low) + high) & LOW)
    return scrambled(low ^ (high >> 1)) >> 1 << 32 | mixed


def scrambled(x: np.ndarray) -> np.ndarray:
    """Return ``x``, an array of 32-bit integers, after a pseudo-random permutation of the 32-bit integers.

    Different integers stay different. The permutation consists of xor-shifts and multiplications by odd numbers.
    """
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & LOW
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


def step_normals(seeds: np.ndarray, shape: tuple[int, ...], like: Tensor, step: int) -> Tensor:
    """Return the standard normal variables of the step with the index ``step``, of the given shape.

    They are generated from ``seeds[step]`` whenever they are needed, and not stored.
    """
    try:
        generator = torch.Generator(like.device)
    except RuntimeError:  # the device has no generator
        generator = torch.Generator()
    generator.manual_seed(int(seeds[step]))
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


@dataclass(frozen=True)
class BrownianIncrements:
    r"""The noise of all steps of a native SDE method, for solving several times with the same Brownian path.

    Pass it as ``hbnode.sdeint(..., noise=increments)``. :meth:`coarser` combines the noise of pairs of steps, so that
    solves with step sizes H, 2H, 4H, ... use the same Brownian path. The differences of these solves are strong errors.

    The noise is stored as standard normal variables, because the increments I and J that a step needs depend on the
    damping γ. For a Brownian motion W and a step of length τ, I = ∫ e^{-γ(τ-t)} dW and
    J = ∫ (1 - e^{-γ(τ-t)})/γ dW. Two steps of lengths τ₁ and τ₂ together have the increments

    .. math:: I = e^{-\gamma\tau_2} I_1 + I_2, \quad J = J_1 + \tfrac{1 - e^{-\gamma\tau_2}}{\gamma} I_1 + J_2 .

    ``"ubu"`` uses I and J of both halves of a step, and ``"baoab"`` uses I of a step. ``"nystrom4"`` uses the increment
    of W and two integrals of its Brownian bridge, which do not depend on γ.

    Arguments:
        method: the native method that uses the noise.
        sizes: the size of each step in units of time, (steps,), or (steps, batch) if samples have their own times.
        normals: independent standard normal variables, (steps, n, batch, ...), with n = 4 for ``"ubu"``, 1 for
            ``"baoab"`` and 3 for ``"nystrom4"``, followed by the shape of h.
        damping: the damping γ with which :meth:`coarser` combines the noise of ``"ubu"`` and ``"baoab"``. It must be
            that of the SDE, or the Brownian path changes.

    Example:
        >>> import torch, hbnode
        >>> sde = hbnode.HeavyBallSDE(lambda h: -h, damping=1.0, temperature=0.5, learn_damping=False)
        >>> state = sde.initial_state(torch.zeros(1000, 1, dtype=torch.float64))
        >>> noise = hbnode.solve.BrownianIncrements.draw(sde, state[0], [0.0, 1.0], dt=0.01, seed=0)
        >>> errors = []
        >>> exact, _ = hbnode.sdeint(sde, state, [0.0, 1.0], dt=0.01, noise=noise)
        >>> for _ in range(2):
        ...     noise = noise.coarser()
        ...     h, _ = hbnode.sdeint(sde, state, [0.0, 1.0], dt=float(noise.sizes[0]), noise=noise)
        ...     errors.append((h - exact)[-1].square().mean().sqrt())
        >>> bool(errors[0] < errors[1] < 1e-4)
        True
    """

    method: str
    sizes: Tensor
    normals: Tensor
    damping: float | Tensor

    @classmethod
    def draw(
        cls, sde: HeavyBallSDE, h: Tensor, t: Times, *, dt: float, method: str = "ubu", seed: int | None = None
    ) -> BrownianIncrements:
        """Draw the noise that ``hbnode.sdeint(sde, (h, m), t, method=method, dt=dt, seed=seed)`` would use.

        Arguments:
            sde: the SDE, whose damping γ is stored for :meth:`coarser`.
            h: the initial h, (batch, ...), for its shape, dtype and device.
            t: output times, as for :func:`hbnode.sdeint`.
            dt: the largest step size, in units of time.
            method: the native method that uses the noise. Default: ``"ubu"``.
            seed: an integer; None draws one from torch's generator. Default: None.

        Returns:
            The increments.
        """
        if not isinstance(unwrap_compiled(sde), HeavyBallSDE):
            raise TypeError(NO_SDE.format(type(sde).__name__))
        if method not in NATIVE:
            near = nearest(method, tuple(NATIVE)) or "ubu"
            raise ValueError(f"noise is for one of {tuple(NATIVE)}, got method={method!r}. Fix: method={near!r}.")
        check_input(h, "h")
        times, counts = time_grid(t, dt)
        if times.dim() == 2:
            count_samples(h, times, Settings())
        sizes = step_sizes(times, counts)
        seeds, shape = step_seeds(seed, len(sizes)), (NATIVE[method].normals, *h.shape)
        normals = [step_normals(seeds, shape, h, step) for step in range(len(sizes))]
        damping = torch.as_tensor(sde.solver_damping(), dtype=torch.float64, device="cpu").detach()
        return cls(method, sizes, torch.stack(normals) if normals else h.new_zeros(0, *shape), damping)

    def coarser(self) -> BrownianIncrements:
        """Return the noise of steps of twice the size on the same Brownian path.

        Returns:
            The increments of half as many steps.

        Raises:
            ValueError: the number of steps is odd, or the steps of a pair have different sizes.
        """
        sizes = self.sizes.detach().to("cpu", torch.float64)
        fix = "Fix: draw the noise with a dt that divides each interval into an even number of steps."
        if len(sizes) % 2:
            raise ValueError(f"the noise has {len(sizes)} steps; expected an even number, to compose pairs. {fix}")
        first, second = sizes[::2], sizes[1::2]
        if not torch.allclose(first, second, rtol=1e-6, atol=0.0):
            raise ValueError(f"the steps of a pair have different sizes: an output time is between them. {fix}")
        size = first.to(self.normals.device).clamp(min=TINY)
        size = size.reshape(*size.shape, *[1] * (self.normals.dim() - 1 - size.dim()))
        damping = torch.as_tensor(self.damping, dtype=torch.float64, device=size.device)
        normals = NATIVE[self.method].compose(self.normals[::2], self.normals[1::2], size, damping)
        return replace(self, sizes=first + second, normals=normals.to(self.normals.dtype))


# The solve


@dataclass(frozen=True)
class SDEStepper(Stepper):
    """A :class:`~hbnode.solve.stepper.Stepper` for the fixed steps of a heavy-ball SDE.

    Attributes:
        packed: the coefficients of a step in each output interval, (coefficients, intervals, ...). Gradients with
            respect to the damping γ and the temperature η pass through this tensor.
        ends: the number of steps from the start to the end of each interval.
    """

    packed: Any = None
    ends: Any = None

    @property
    def constants(self) -> Tensor:
        packed: Tensor = self.packed
        return packed

    def with_constants(self, constants: Tensor) -> SDEStepper:
        return replace(self, packed=constants)

    def coefficients(self, attempt: Attempt) -> tuple[Rows, None]:
        interval = int(self.ends.searchsorted(attempt.number, "right"))
        return self.method.unpack(self.packed[:, interval], self.term.dims_of_row, error=False), None

    def failure(self, kind: type[SolverError], message: str, t: Any, size: Any) -> SolverError:
        fix = "" if "Fix:" in message else ". Fix: a smaller dt"
        return super().failure(kind, message + fix, t, size)


def sde_setup(term: ODETerm, method: str, t: Tensor, counts: np.ndarray, noise: Noise) -> Setup:
    """Return the setup of a solve of a heavy-ball SDE.

    ``counts`` holds the number of steps in each interval between output times. ``noise`` returns the normal variables
    of a step.
    """
    eta = term.inner.solver_temperature()
    eta = term.aligned(eta, "temperature", "η") if isinstance(eta, Tensor) else eta
    eta = torch.as_tensor(eta, dtype=torch.float64, device="cpu")
    gamma = torch.as_tensor(term.damping, dtype=torch.float64, device="cpu")
    of_sde = NATIVE[method]
    grid = Grid.of(t, term.template.detach(), term.lanes)
    strongest = to_numpy(gamma).max(initial=0.0)
    sizes = np.diff(grid.points, axis=0) / counts.reshape(-1, *[1] * grid.begin.ndim)
    if strongest * sizes.max(initial=0.0) > of_sde.reach:
        raise ValueError(
            f"method={method!r} needs steps of at most {of_sde.reach:g}/γ, got a damping of {strongest:g} and steps of "
            f"{sizes.max():g}. Fix: dt={0.99 * of_sde.reach / strongest:.3g}, or method='ubu'."
        )
    dims = max(gamma.dim(), eta.dim()) if term.lanes is None else term.dims_of_row - 1
    size = torch.from_numpy(sizes).reshape(*sizes.shape, *[1] * dims)
    of_sizes = functools.partial(of_sde.coefficients, gamma, diffusion(gamma, eta))
    packed = of_sizes(size.clamp(min=TINY))
    if not size.all():  # a sample with equal successive output times has steps of size 0
        packed = torch.where(size > 0, packed, of_sizes(size).detach().nan_to_num())
    settings = Settings(method, steps=1)
    parts = {"packed": packed.to(term.template), "ends": counts.cumsum(), "noise": noise}
    stepper = SDEStepper.of(term, of_sde, settings, gamma, **parts)
    return Setup(stepper, grid, settings, counts.tolist())


def check_growth(setup: Setup) -> None:
    """Raise ReversalError if reversed steps would let rounding errors grow beyond 1e-4.

    With the damping γ, rounding errors grow by the factor e^{γT} between output times that are T apart.
    """
    dtype, longest = setup.stepper.like.dtype, np.diff(setup.grid.points, axis=0).max(initial=0.0)
    strongest = to_numpy(torch.as_tensor(setup.stepper.gamma)).max(initial=0.0)
    eps, growth = torch.finfo(dtype).eps, strongest * longest
    if math.log(eps) + growth > math.log(MOST_ROUNDING):
        message = (
            f"reversing the damping of {strongest:g} over {longest:g} between two output times grows rounding errors, "
            f"{eps:.1g} in {dtype}, by e^{growth:.3g}; expected less than {MOST_ROUNDING:g} of the state. "
            "Fix: gradient='checkpoint', float64, or output times closer together"
        )
        raise setup.stepper.failure(ReversalError, message, setup.grid.begin, math.nan)


@untraced
def sdeint(
    sde: HeavyBallSDE,
    y0: tuple[Tensor, Tensor],
    t: Times,
    *,
    method: SDEMethodName = "ubu",
    dt: float,
    gradient: Gradient | Direct | Checkpoint | Reversible = "direct",
    seed: int | None = None,
    noise: BrownianIncrements | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Solve a heavy-ball SDE, :math:`dh = m\,dt,\; dm = (-\gamma m + f(h, t))\,dt + \sqrt{2\gamma\eta}\,dW`.

    Here γ is the damping, η the temperature, W a Brownian motion, and f the network of ``sde``. The native methods
    solve the linear part (f = 0) with its noise exactly:

    - ``"ubu"``: a step is half a step of the linear part, an update of m by f, and half a step of the linear part. It
      has strong order 2 and one evaluation of f per step.
    - ``"baoab"`` has strong order 1, weak order 2 and one evaluation per step. Of the three methods, its stationary
      distribution is closest to that of the equation.
    - ``"nystrom4"``: the shifted ODE method with steps of ``odeint``'s ``"nystrom4"``. It has strong order 3 and three
      evaluations per step. It needs γ dt <= 2.

    The steps of native methods end on the output times. Each interval between output times is divided into the smallest
    number of equal steps that are not longer than ``dt``. If samples have their own times, all samples have the same
    number of steps in their k-th intervals, and one call of f evaluates the whole batch. torchsde's methods take steps
    of ``dt`` from the first time and interpolate the outputs linearly.

    The native methods compute the exact gradient of the discrete solution for fixed normal variables, with respect to
    the initial state, the parameters of f, γ and η. ``"direct"`` backpropagates through the steps. ``"checkpoint"``
    stores the graph up to 64 MiB and recomputes later steps. ``"reversible"`` stores only the outputs and reconstructs
    the other states by reversing the steps. Both regenerate the noise from its seed. Reversed steps multiply rounding
    errors by e^{γT} between output times that are T apart. ``"reversible"`` raises ReversalError if the errors would
    exceed 1e-4, so γT may be at most 6.7 in float32 and 26 in float64.

    The noise of a step depends on the seed, the step index, the shape and the dtype. It is the same on all devices of
    one type.

    References:
        Sanz-Serna and Zygalakis (2021) for UBU; Leimkuhler and Matthews, doi:10.1093/amrx/abs010, for BAOAB; Foster,
        Lyons and Oberhauser, arXiv:2101.03446, for the shifted ODE method; Li et al., arXiv:2001.01328, for torchsde.

    Arguments:
        sde: the equation.
        y0: initial ``(h, m)`` of equal shape (batch, ...), for instance ``sde.initial_state(x)``.
        t: output times, (T,), strictly increasing, in the units of time of γ. The first is the time of ``y0``. Native
            methods also take (batch, T), one row of times per sample, in which times may repeat. A function ``f(t, h)``
            then gets t of shape (batch, 1, ...).
        method: ``"ubu"``, ``"baoab"`` or ``"nystrom4"``, or a method of torchsde: ``"euler"``, ``"milstein"``,
            ``"srk"``, ``"midpoint"``, ``"heun"``, ``"euler_heun"``, ``"log_ode"`` or ``"reversible_heun"``.
            Default: ``"ubu"``.
        dt: the largest step size, in units of time. Rounded times may make a step 1 % longer.
        gradient: ``"direct"``, ``"checkpoint"`` or ``"reversible"`` (not for ``"nystrom4"``), or an object of
            ``hbnode.solve.adjoints``, ``Checkpoint(keep_bytes=0)`` for instance; with torchsde's methods ``"direct"``
            or ``"adjoint"``, which is ``torchsde.sdeint_adjoint``. Default: ``"direct"``.
        seed: an integer that determines the noise; None draws one from torch's generator. Default: None.
        noise: the noise for a native method, instead of a seed. Default: None.

    Returns:
        The trajectories ``(h, m)`` at the times ``t``, each (T, batch, ...).

    Raises:
        ValueError: an argument is out of range, or f returns a wrong shape.
        TypeError: an argument has the wrong type or dtype.
        NonFiniteError: the state or f became infinite or NaN.
        ReversalError: rounding errors would grow too much in ``"reversible"``, or the discretization errors of
            torchsde's ``"adjoint"`` would.

    Example:
        >>> import torch, hbnode
        >>> sde = hbnode.HeavyBallSDE(torch.nn.Linear(2, 2), temperature=0.1)
        >>> state = sde.initial_state(torch.randn(64, 2))
        >>> h, m = hbnode.sdeint(sde, state, [0.0, 0.5, 1.0], dt=0.1, gradient="reversible", seed=0)
        >>> h.shape
        torch.Size([3, 64, 2])
        >>> h[-1].square().mean().backward()
    """
    if not isinstance(unwrap_compiled(sde), HeavyBallSDE):
        raise TypeError(NO_SDE.format(type(sde).__name__))
    name: Any = getattr(gradient, "name", gradient)
    if name not in GRADIENTS.get(method, ()):
        raise method_error(method, name)
    snapshot = snapshot_of(sde, y0, t)
    state: Any = checked_state(sde, y0, snapshot)
    times, counts = time_grid(t, dt)
    lanes = count_samples(state, times, Settings()) if times.dim() == 2 else None
    tally = Tally(sde, NFE())
    term = ODETerm(sde, state, tally, second_order=True, lanes=lanes, keeps_shape=method in NATIVE)
    if term.traced:
        raise ValueError("sdeint cannot be a part of a traced or exported graph. Fix: call it outside of the graph.")
    h = term.template
    if term.time_dependent:
        check_resolution(to_numpy(times), h.dtype)
    if noise is not None:
        check_noise(noise, method, name, seed, step_sizes(times, counts), h)
    if method not in NATIVE:
        if lanes is not None:
            what = f"method={method!r} is torchsde's, in which all samples have the same times"
            fix = "method='ubu'; or, if all rows start at the same time, t=torch.unique(t), and select"
            raise ValueError(f"{what}, got t of shape {tuple(times.shape)}. Fix: {fix} each sample's own times.")
        return torchsde.solve(term, state, times, float(dt), method, name, seed)
    if change_of_call(sde) is not None:
        what = "calls func but not the SDE, whose hooks or overridden forward would be skipped"
        raise ValueError(f"method={method!r} {what}. Fix: put them into func, or method='srk'.")
    if noise is None:
        shape = (NATIVE[method].normals, *h.shape)
        of_step: Noise = functools.partial(step_normals, step_seeds(seed, counts.sum()), shape, h)
    else:
        of_step = noise.normals.__getitem__
    setup = sde_setup(term, method, times, counts, of_step)
    if name == "reversible" and torch.is_grad_enabled():
        check_growth(setup)
    (h, m), _ = run(setup, state, snapshot, gradient_mode(gradient))
    return h, m


def method_error(method: str, gradient: str) -> ValueError:
    methods = tuple(GRADIENTS)
    if method not in methods:
        fix = f"method={nearest(method, methods) or 'ubu'!r}"
        if method in ALL_METHODS:
            fix = f"{fix}, or hbnode.odeint, which solves the ODE without noise"
        return ValueError(f"unknown method {method!r}; expected one of {methods}. Fix: {fix}.")
    gradients = GRADIENTS[method]
    fixes = {
        "reversible": "method='ubu' with gradient='reversible', or gradient='direct'",
        "adjoint": "gradient='checkpoint', which is exact",
    }
    fix = fixes.get(gradient, f"gradient={nearest(gradient, gradients) or 'direct'!r}")
    return ValueError(f"gradient={gradient!r} is not for method={method!r}; expected one of {gradients}. Fix: {fix}.")


def check_noise(noise: object, method: str, gradient: str, seed: int | None, sizes: Tensor, h: Tensor) -> None:
    """Raise an error if ``noise`` has the wrong type, steps or shape, or conflicts with another argument."""
    if not isinstance(noise, BrownianIncrements):
        fix = "hbnode.solve.BrownianIncrements.draw(...)"
        raise TypeError(f"noise must be BrownianIncrements, got {type(noise).__name__}. Fix: {fix}.")
    if seed is not None:
        raise ValueError("seed and noise are both given, and both determine the noise. Fix: leave seed out.")
    if method != noise.method:
        fix = "draw it with method=" if method in NATIVE else "torchsde.sdeint(sde, torch.cat([h, m], -1), t, bm=...)"
        raise ValueError(f"the noise is for method={noise.method!r}, got method={method!r}. Fix: {fix}.")
    given, normals = noise.sizes.detach().to("cpu", torch.float64), noise.normals
    if given.shape != sizes.shape or not torch.allclose(given, sizes, rtol=1e-6, atol=0.0):
        raise ValueError(
            f"the noise has {len(given)} steps, but t and dt give {len(sizes)}; expected noise.sizes of shape "
            f"{tuple(sizes.shape)}. Fix: dt=float(noise.sizes.max()) with the t of BrownianIncrements.draw."
        )
    expected = (len(sizes), NATIVE[method].normals, *h.shape)
    if normals.shape != expected or normals.dtype != h.dtype or normals.device != h.device:
        raise ValueError(
            f"noise.normals has shape {tuple(normals.shape)}, {normals.dtype} on {normals.device}; "
            f"expected {expected}, {h.dtype} on {h.device}. Fix: BrownianIncrements.draw with h of this y0."
        )
    if gradient == "reversible" and normals.requires_grad:
        raise ValueError("noise.normals requires a gradient. Fix: gradient='direct', or detach it.")
