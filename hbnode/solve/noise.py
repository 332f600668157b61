"""The noise of an SDE: drawn from a seed, step by step, or given; and the steps that it is drawn for."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode._checks import as_seed, check_input
from hbnode._state import Times
from hbnode._suggestions import nearest
from hbnode.fields import HeavyBallSDE
from hbnode.solve.odeint import checked_times
from hbnode.solve.term import unwrapped

NORMALS = {"ubu": 4, "baoab": 1, "nystrom4": 3}  # standard normal variables in a step, for each element of h
ROUNDING = 1e-2  # of dt, by which a step may be longer for times that are rounded
MOST_STEPS = 10_000_000
_BRIDGE = (1.0, 1 / 12, 1 / 720)  # variances of W, L and K over a step of size 1
_LOW = 0xFFFFFFFF


def free_flight(damping: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""The free flight with noise, :math:`dh = m\,dt,\; dm = -\gamma m\,dt + s\,dW` over a time :math:`\tau`, exactly.

    With a = (1 - e^{-γτ})/γ, b = e^{-γτ} and z = γτ,

        h ← h + a m + s J,   m ← b m + s I,   I = ∫ e^{-γ(τ-t)} dW,   J = ∫ (1 - e^{-γ(τ-t)})/γ dW,

    where (I, J) is Gaussian. Two independent standard normal variables make it:

        I = p ξ₁,   J = q ξ₁ + r ξ₂,
        p² = Var I = (1 - b²)/(2γ),   q = p Cov(I, J)/Var I = p a/(1 + b),   r² = Var(J | I) = (z - 2 tanh(z/2))/γ³.

    The form for r² follows from J = (W - I)/γ and Var(W | I) = τ - a²/Var I = τ - (2/γ) tanh(z/2).

    Arguments:
        damping: γ, in float64.
        time: τ, which broadcasts with it.

    Returns:
        The coefficients a, b, p, q and r.
    """
    z = damping * time
    b = torch.exp(-z)
    a = time * _decay_mean(z)
    p = (time * _decay_mean(2 * z)).sqrt()
    return a, b, p, p * a / (1 + b), (time**3 * _rest_variance(z)).sqrt()


def _decay_mean(z: Tensor) -> Tensor:
    """The mean of e^{-zs} over s in [0, 1], (1 - e^{-z})/z."""
    small = z < 1e-3
    safe = torch.where(small, torch.ones_like(z), z)
    return torch.where(small, 1 - z / 2 * (1 - z / 3 * (1 - z / 4 * (1 - z / 5))), -torch.expm1(-safe) / safe)


def _rest_variance(z: Tensor) -> Tensor:
    """The value of (z - 2 tanh(z/2))/z³; 1/12 at 0.

    For small z by the continued fraction tanh x = x/(1 + x²/(3 + x²/(5 + ...))), in which nothing cancels.
    """
    small = z < 2
    square = torch.where(small, z, torch.ones_like(z)).square() / 4
    tail = torch.full_like(z, 17.0)
    for odd in (15, 13, 11, 9, 7, 5, 3):
        tail = odd + square / tail
    safe = torch.where(small, torch.full_like(z, 2.0), z)
    return torch.where(small, 1 / (4 * (tail + square)), (safe - 2 * torch.tanh(safe / 2)) / safe**3)


class SeededNoise:
    """Standard normal variables that a seed and the number of a step determine, so that nothing has to be kept.

    Arguments:
        seed: a whole number of at most 64 bits; None draws one from torch's generator of the CPU.
        shape: of the variables of one step.
        like: has their dtype and device.
    """

    def __init__(self, seed: int | None, shape: tuple[int, ...], like: Tensor) -> None:
        self.seed, self.shape, self.like = drawn(seed), shape, like.new_empty(0)
        try:
            self.generator = torch.Generator(like.device)
        except RuntimeError:  # a device that has none
            self.generator = torch.Generator()

    def __call__(self, step: int) -> Tensor:
        """The variables of a step."""
        generator = self.generator.manual_seed(step_seed(self.seed, step))
        normals = torch.randn(self.shape, generator=generator, dtype=self.like.dtype, device=generator.device)
        return normals if generator.device == self.like.device else normals.to(self.like.device)


def drawn(seed: int | None) -> int:
    """A seed, drawn from torch's generator of the CPU where there is none."""
    return int(torch.randint(2**62, ())) if seed is None else as_seed(seed)


def step_seed(seed: int, step: int) -> int:
    """The seed of a step: 63 bits, the low 32 of which differ between the steps of a solve.

    torch's generator of the CPU takes the low 32 bits alone. For a given seed they are a permutation of the number of
    the step.
    """
    low, high = _scrambled(seed & _LOW), _scrambled(((seed >> 32) & _LOW) ^ 0x9E3779B9)
    mixed = _scrambled((_scrambled(step ^ low) + high) & _LOW)
    return (_scrambled(low ^ (high >> 1)) >> 1) << 32 | mixed


def _scrambled(x: int) -> int:
    """A permutation of the whole numbers of 32 bits: xors with shifts, and products with odd numbers."""
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _LOW
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def step_counts(t: np.ndarray, dt: float) -> np.ndarray:
    """How many equal steps no longer than ``dt`` divide each interval between output times.

    Times of float32 are rounded: an interval that is longer than some steps by that alone has no step more.
    """
    check_number(t[-1] - t[0], dt)
    precision = np.finfo(np.float32 if (t == t.astype(np.float32)).all() else t.dtype).eps  # of what the user had
    rounded = np.minimum(precision * np.maximum(abs(t[:-1]), abs(t[1:])), ROUNDING * dt)
    return np.maximum(np.ceil((np.diff(t) - rounded) / dt * (1 - 1e-9)), 1).astype(int)


def step_sizes(t: np.ndarray, counts: np.ndarray) -> Tensor:
    """The size of each step, (steps,)."""
    return torch.from_numpy(np.repeat(np.diff(t) / counts, counts))


def check_number(span: float, dt: float) -> None:
    """Refuse more steps than anybody waits for."""
    if span / dt > MOST_STEPS:
        raise ValueError(
            f"dt={dt:g} makes {span / dt:.2g} steps of a span of {span:g}; expected at most {MOST_STEPS:,}. "
            f"Fix: dt={2 * span / MOST_STEPS:.1g} or longer, or several solves, each from the end of the one before."
        )


def checked_step(dt: object) -> float:
    """A positive step size."""
    dt = dt.item() if isinstance(dt, Tensor) and dt.numel() == 1 else dt
    if not isinstance(dt, numbers.Real) or not 0 < float(dt) < math.inf:
        raise ValueError(f"dt must be a positive number, got {dt!r}. Fix: dt=0.05, for instance.")
    return float(dt)


def checked_output_times(t: Times, device: torch.device) -> Tensor:
    """Finite, increasing times without a gradient, (T,), in float64 on the host."""
    t = checked_times(t, device, rows=True)
    if t.dim() == 2:
        raise ValueError(
            f"t must be one-dimensional, the times of the whole batch, got shape {tuple(t.shape)}. "
            "Fix: solve at all times of all samples, torch.unique(t), and select each sample's own."
        )
    if t.requires_grad:
        raise ValueError("t requires a gradient, which sdeint does not compute. Fix: t.detach().")
    if len(t) > 1 and bool(t[1] < t[0]):
        raise ValueError(
            "t must increase, because an SDE has no solution backwards in time, but "
            f"t[0]={float(t[0]):g} is followed by t[1]={float(t[1]):g}. Fix: sort the times; y0 is at the first."
        )
    return t.to(torch.float64)


def check_sde(sde: object) -> None:
    """Refuse what is no heavy-ball SDE."""
    if not isinstance(unwrapped(sde), HeavyBallSDE):
        raise TypeError(f"sde must be a HeavyBallSDE, got {type(sde).__name__}. Fix: hbnode.HeavyBallSDE(func).")


@dataclass(frozen=True)
class BrownianIncrements:
    r"""The noise of a native solve, step by step, to be used again or composed to that of longer steps.

    ``hbnode.sdeint(..., noise=increments)`` solves with it. :meth:`coarser` composes the noise of each two steps, so
    that solves with the steps H, 2H, 4H, ... see the same Brownian path. This is how one measures a strong error.

    The increments are stored as standard normal variables, because the increments themselves depend on γ. For a path
    with the increments I = ∫ e^{-γ(τ-t)} dW and J = ∫ (1 - e^{-γ(τ-t)})/γ dW over two times τ₁ and τ₂, the composition
    is

    .. math:: I = e^{-\gamma\tau_2} I_1 + I_2, \quad J = J_1 + \tfrac{1 - e^{-\gamma\tau_2}}{\gamma} I_1 + J_2 .

    Method ``"ubu"`` has I and J of both halves of a step, ``"baoab"`` has I of a step, and ``"nystrom4"`` has the
    increment of the Brownian motion and two integrals of its bridge, which do not depend on γ.

    Arguments:
        method: the native method that it is for.
        sizes: the size of each step, (steps,), in units of time.
        normals: independent standard normal variables, (steps, n, batch, ...), with n = 4 for ``"ubu"``, 1 for
            ``"baoab"`` and 3 for ``"nystrom4"``, followed by the shape of h.
        damping: γ, with which ``"ubu"`` and ``"baoab"`` compose. An SDE with another γ sees another path then.

    Example:
        >>> import torch, hbnode
        >>> sde = hbnode.HeavyBallSDE(lambda h: -h, damping=1.0, temperature=0.5, learn_damping=False)
        >>> state = sde.initial_state(torch.zeros(1000, 1, dtype=torch.float64))
        >>> noise = hbnode.BrownianIncrements.draw(sde, state[0], [0.0, 1.0], dt=0.01, seed=0)
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
        """Draw the noise that ``hbnode.sdeint(sde, (h, m), t, method=method, dt=dt, seed=seed)`` draws.

        Arguments:
            sde: the SDE, whose γ it is composed with.
            h: the initial h, (batch, ...), for its shape, dtype and device.
            t: output times, as for :func:`hbnode.sdeint`.
            dt: the longest step, in units of time.
            method: the native method that it is for. Default: ``"ubu"``.
            seed: a whole number; None draws one from torch's generator. Default: None.

        Returns:
            The increments.
        """
        check_sde(sde)
        if method not in NORMALS:
            near = nearest(method, tuple(NORMALS)) or "ubu"
            raise ValueError(f"noise is for one of {tuple(NORMALS)}, got method={method!r}. Fix: method={near!r}.")
        check_input(h, "h")
        times = _torch.to_numpy(checked_output_times(t, h.device))
        sizes = step_sizes(times, step_counts(times, checked_step(dt)))
        noise = SeededNoise(seed, (NORMALS[method], *h.shape), h)
        normals = (
            torch.stack([noise(step) for step in range(len(sizes))]) if len(sizes) else h.new_zeros(0, *noise.shape)
        )
        damping = sde.solver_damping()
        damping = damping.detach().to("cpu", torch.float64) if isinstance(damping, Tensor) else damping
        return cls(method, sizes, normals, damping)

    def coarser(self) -> BrownianIncrements:
        """The noise of steps of twice the size.

        Returns:
            The increments of the composed steps, half as many.

        Raises:
            ValueError: the number of steps is odd, or two steps to be composed are of unlike size.
        """
        sizes = self.sizes.detach().to("cpu", torch.float64)
        fix = "Fix: draw the noise with a dt that divides each interval into an even number of steps."
        if len(sizes) % 2:
            raise ValueError(
                f"the noise has {len(sizes)} steps, of which each two are composed; expected an even number. {fix}"
            )
        first, second = sizes[::2], sizes[1::2]
        if not torch.allclose(first, second, rtol=1e-6, atol=0.0):
            raise ValueError(f"steps of unlike size cannot be composed: an output time is between them. {fix}")
        size = first.to(self.normals.device).reshape(-1, *[1] * (self.normals.dim() - 2))
        one, two = self.normals[::2], self.normals[1::2]  # (steps, n, ...)
        if self.method == "nystrom4":
            normals = _composed_integrals(one, two, size)
        else:
            damping = torch.as_tensor(self.damping, dtype=torch.float64, device=size.device)
            pairs = [(one, two, size)]
            if self.method == "ubu":  # a step becomes half of one: its two halves are composed
                pairs = [(x[:, :2], x[:, 2:], size / 2) for x in (one, two)]
            normals = torch.cat([_composed_flights(*pair, damping) for pair in pairs], 1)
        return dataclasses.replace(self, sizes=first + second, normals=normals.to(self.normals.dtype))

    def of(self, method: str, t: np.ndarray, counts: np.ndarray, h: Tensor) -> Callable[[int], Tensor]:
        """The variables of a step by its number, checked to be those of a solve."""
        if method != self.method:
            raise ValueError(
                f"the noise is for method={self.method!r}, got method={method!r}. Fix: draw it with method=."
            )
        wanted = step_sizes(t, counts)
        given = self.sizes.detach().to("cpu", torch.float64)
        if given.shape != wanted.shape or not torch.allclose(given, wanted, rtol=1e-6, atol=0.0):
            raise ValueError(
                f"the noise has {len(given)} steps, and t and dt make {len(wanted)} steps; expected the same steps. "
                "Fix: dt=float(noise.sizes.max()) with the t that the noise was drawn for."
            )
        expected = (len(wanted), NORMALS[method], *h.shape)
        if self.normals.shape != expected or self.normals.dtype != h.dtype or self.normals.device != h.device:
            raise ValueError(
                f"noise.normals has shape {tuple(self.normals.shape)}, {self.normals.dtype} on {self.normals.device}; "
                f"expected {expected}, {h.dtype} on {h.device}. Fix: BrownianIncrements.draw with the h that is solved."
            )
        return self.normals.__getitem__


def _composed_flights(first: Tensor, second: Tensor, size: Tensor, damping: Tensor) -> Tensor:
    """The variables of a flight from those of its two halves, each of the time ``size``: (steps, variables, ...)."""
    (a, b, p, q, r), (_, _, whole_p, whole_q, whole_r) = free_flight(damping, size), free_flight(damping, 2 * size)
    i1, i2 = p * first[:, 0], p * second[:, 0]
    xi1 = (b * i1 + i2) / whole_p
    if first.shape[1] == 1:
        return xi1.unsqueeze(1)
    j1, j2 = (q * x[:, 0] + r * x[:, 1] for x in (first, second))
    return torch.stack([xi1, (j1 + a * i1 + j2 - whole_q * xi1) / whole_r], 1)


def _composed_integrals(first: Tensor, second: Tensor, size: Tensor) -> Tensor:
    """The variables W, L and K of a step from those of its two halves, through P = ∫ B dt and Q = ∫ t B dt."""

    def integrals(normals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, bridge, skew = (x * (size * v).sqrt() for x, v in zip(normals.unbind(1), _BRIDGE, strict=True))
        p = size * (bridge + w / 2)
        return w, p, size * p / 2 - size**2 * (skew - w / 12)

    (w1, p1, q1), (w2, p2, q2) = integrals(first), integrals(second)
    w, p = w1 + w2, p1 + size * w1 + p2
    q = q1 + size * (size * w1 + p2) + size**2 / 2 * w1 + q2
    whole = 2 * size
    values = (w, p / whole - w / 2, (whole * p / 2 - q) / whole**2 + w / 12)
    return torch.stack([x / (whole * v).sqrt() for x, v in zip(values, _BRIDGE, strict=True)], 1)
