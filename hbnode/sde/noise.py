"""The noise of a solve: drawn from a seed, step by step, or given."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hbnode._checks import as_seed, check_input
from hbnode._state import Times
from hbnode._suggestions import nearest
from hbnode.sde.field import HeavyBallSDE
from hbnode.sde.free_flight import free_flight
from hbnode.sde.grid import StepGrid, checked_output_times, checked_step
from hbnode.sde.methods import NATIVE
from hbnode.solvers.ode_term import unwrapped

_MASK = 0xFFFFFFFF


class SeededNoise:
    """Standard normal variables that a seed and the number of a step determine, so that nothing has to be kept.

    Arguments:
        seed: a whole number.
        shape: of the variables of one step.
        like: has their dtype and device.
    """

    def __init__(self, seed: int, shape: tuple[int, ...], like: Tensor) -> None:
        self.seed, self.shape = seed, shape
        self.dtype, self.device = like.dtype, like.device
        self.generator = _generator(like.device)

    def __call__(self, step: int) -> Tensor:
        """The variables of a step."""
        generator = self.generator.manual_seed(step_seed(self.seed, step))
        normals = torch.randn(self.shape, generator=generator, dtype=self.dtype, device=generator.device)
        return normals if generator.device == self.device else normals.to(self.device)


def _generator(device: torch.device) -> torch.Generator:
    """A generator on the device, on the CPU where the device has none."""
    try:
        return torch.Generator(device=device)
    except RuntimeError:
        return torch.Generator()


def step_seed(seed: int, step: int) -> int:
    """The seed of a step: 63 bits, the low 32 of which differ between the steps of a solve.

    torch's generator of the CPU takes the low 32 bits alone. For a given seed they are a permutation of the number of
    the step.
    """
    low, high = _scrambled(seed & _MASK), _scrambled(((seed >> 32) & _MASK) ^ 0x9E3779B9)
    mixed = _scrambled((_scrambled(step ^ low) + high) & _MASK)
    return (_scrambled(low ^ (high >> 1)) >> 1) << 32 | mixed


def _scrambled(x: int) -> int:
    """A permutation of the whole numbers of 32 bits: xors with shifts, and products with odd numbers."""
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _MASK
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def drawn_seed() -> int:
    """A seed from torch's generator of the CPU."""
    return int(torch.randint(2**62, ()))


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
        cls,
        sde: HeavyBallSDE,
        h: Tensor,
        t: Times,
        *,
        dt: float,
        method: str = "ubu",
        seed: int | None = None,
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
        checked_method(method)
        check_input(h, "h")
        grid = StepGrid(checked_output_times(t, h.device), checked_step(dt))
        count = NATIVE[method].normals
        seeded = SeededNoise(checked_seed(seed), (count, *h.shape), h)
        normals = [seeded(step) for step in range(len(grid))]
        damping = sde.solver_damping()
        damping = damping.detach().to("cpu", torch.float64) if isinstance(damping, Tensor) else damping
        return cls(
            method, grid.step_sizes(), torch.stack(normals) if normals else h.new_zeros(0, count, *h.shape), damping
        )

    def coarser(self) -> BrownianIncrements:
        """The noise of steps of twice the size.

        Returns:
            The increments of the composed steps, half as many.

        Raises:
            ValueError: the number of steps is odd, or two steps to be composed are of unlike size.
        """
        sizes = self.sizes.detach().to("cpu", torch.float64)
        if len(sizes) % 2:
            raise ValueError(
                f"the noise has {len(sizes)} steps, of which each two are composed; expected an even number. "
                "Fix: draw it with a dt that divides each interval into an even number of steps."
            )
        first, second = sizes[::2], sizes[1::2]
        if not torch.allclose(first, second, rtol=1e-6, atol=0.0):
            raise ValueError(
                "steps of unlike size cannot be composed: an output time is between them. "
                "Fix: draw the noise with a dt that divides each interval into an even number of steps."
            )
        steps, count = self.normals.shape[:2]
        shape = self.normals.shape[2:]
        size = _along(sizes[0::2], self.normals)
        pairs = self.normals.reshape(steps // 2, 2, count, *shape)
        if self.method == "nystrom4":
            normals = _composed_integrals(pairs[:, 0].unbind(1), pairs[:, 1].unbind(1), size)
        else:
            compose = functools.partial(_composed_flights, damping=self._damping(size))
            if self.method == "ubu":  # a step becomes half of one: its two halves are composed
                halves = pairs.reshape(steps // 2, 2, 2, 2, *shape)
                composed = [compose(halves[:, i, 0].unbind(1), halves[:, i, 1].unbind(1), size / 2) for i in (0, 1)]
                normals = torch.cat(composed, 1)
            else:
                normals = compose(pairs[:, 0].unbind(1), pairs[:, 1].unbind(1), size)
        return dataclasses.replace(self, sizes=first + second, normals=normals.to(self.normals.dtype))

    def _damping(self, size: Tensor) -> Tensor:
        """The damping as a tensor that broadcasts with the variables of all steps."""
        damping = torch.as_tensor(self.damping, dtype=torch.float64, device=size.device)
        return damping.reshape(*[1] * (size.dim() - damping.dim()), *damping.shape)

    def of(self, method: str, grid: StepGrid, h: Tensor) -> Callable[[int], Tensor]:
        """The variables of a step by its number, checked to be those of a solve."""
        if method != self.method:
            raise ValueError(
                f"the noise is for method={self.method!r}, got method={method!r}. Fix: draw it with method=."
            )
        wanted = grid.step_sizes()
        given = self.sizes.detach().to("cpu", torch.float64)
        if given.shape != wanted.shape or not torch.allclose(given, wanted, rtol=1e-6, atol=0.0):
            raise ValueError(
                f"the noise has {len(given)} steps, and t and dt make {len(wanted)} steps; expected the same steps. "
                "Fix: dt=float(noise.sizes.max()) with the t that the noise was drawn for."
            )
        expected = (len(wanted), NATIVE[method].normals, *h.shape)
        if self.normals.shape != expected or self.normals.dtype != h.dtype or self.normals.device != h.device:
            raise ValueError(
                f"noise.normals has shape {tuple(self.normals.shape)}, {self.normals.dtype} on {self.normals.device}; "
                f"expected {expected}, {h.dtype} on {h.device}. Fix: BrownianIncrements.draw with the h that is solved."
            )
        return self.normals.__getitem__


def check_sde(sde: object) -> None:
    """Refuse what is no heavy-ball SDE."""
    if not isinstance(unwrapped(sde), HeavyBallSDE):
        raise TypeError(f"sde must be a HeavyBallSDE, got {type(sde).__name__}. Fix: hbnode.HeavyBallSDE(func).")


def checked_method(method: object) -> None:
    """Refuse what is no native method."""
    if method not in NATIVE:
        near = nearest(method, tuple(NATIVE)) or "ubu"
        raise ValueError(f"noise is for one of {tuple(NATIVE)}, got method={method!r}. Fix: method={near!r}.")


def checked_seed(seed: object) -> int:
    """A whole number of at most 64 bits, drawn where there is none."""
    return drawn_seed() if seed is None else as_seed(seed)  # type: ignore[arg-type]  # it checks


def _along(values: Tensor, normals: Tensor) -> Tensor:
    """A value for each step, (steps, 1, ...), that broadcasts with one variable of each step."""
    return values.to(normals.device).reshape(-1, *[1] * (normals.dim() - 2))


def _composed_flights(first: tuple[Tensor, ...], second: tuple[Tensor, ...], size: Tensor, damping: Tensor) -> Tensor:
    """The variables of a flight from those of its two halves, each of the time ``size``: (steps, variables, ...)."""
    half, whole = free_flight(damping, size), free_flight(damping, 2 * size)
    i1, i2 = half.p * first[0], half.p * second[0]
    xi1 = (half.b * i1 + i2) / whole.p
    if len(first) == 1:
        return xi1.unsqueeze(1)
    j1, j2 = (half.q * x[0] + half.r * x[1] for x in (first, second))
    xi2 = (j1 + half.a * i1 + j2 - whole.q * xi1) / whole.r
    return torch.stack([xi1, xi2], 1)


def _composed_integrals(first: tuple[Tensor, ...], second: tuple[Tensor, ...], size: Tensor) -> Tensor:
    """The variables W, L and K of a step from those of its two halves, through P = ∫ B dt and Q = ∫ t B dt."""

    def integrals(normals: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        w, bridge, skew = (x * (size * variance).sqrt() for x, variance in zip(normals, _VARIANCES, strict=True))
        p = size * (bridge + w / 2)
        return w, p, size * p / 2 - size**2 * (skew - w / 12)

    (w1, p1, q1), (w2, p2, q2) = integrals(first), integrals(second)
    w = w1 + w2
    p = p1 + size * w1 + p2
    q = q1 + size * (size * w1 + p2) + size**2 / 2 * w1 + q2
    whole = 2 * size
    values = (w, p / whole - w / 2, (whole * p / 2 - q) / whole**2 + w / 12)
    return torch.stack([x / (whole * variance).sqrt() for x, variance in zip(values, _VARIANCES, strict=True)], 1)


_VARIANCES = (1.0, 1 / 12, 1 / 720)
