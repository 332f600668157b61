"""``hbnode.sdeint``: heavy-ball SDEs, by the loop and the gradients of ODEs on a grid, with noise in each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode._state import Times
from hbnode._suggestions import nearest
from hbnode._torch import is_tracing, untraced
from hbnode.errors import NonFiniteError, ReversalError, SolverError
from hbnode.fields import HeavyBallSDE, diffusion
from hbnode.nfe import NFE, Tally
from hbnode.solve import torchsde
from hbnode.solve.adjoints import GRADIENTS, Checkpoint, Direct, Reversible, chosen
from hbnode.solve.control import Attempt
from hbnode.solve.loop import Problem
from hbnode.solve.methods import NYSTROM, Field, Method, Step
from hbnode.solve.noise import (
    NORMALS,
    BrownianIncrements,
    SeededNoise,
    check_sde,
    checked_output_times,
    checked_step,
    free_flight,
    step_counts,
)
from hbnode.solve.odeint import check_finite, checked_state
from hbnode.solve.settings import Gradient, Settings
from hbnode.solve.settings import Method as ODEMethodName
from hbnode.solve.term import ODETerm, Snapshot, is_heavy_ball, solving
from hbnode.solve.torchsde import TorchsdeMethod

NativeSDEMethod = Literal["ubu", "baoab", "nystrom4"]
SDEMethodName = Literal[NativeSDEMethod, TorchsdeMethod]
UNDONE = (
    1e-4  # how far rounding errors may grow between two outputs whose steps are to be undone, relative to the state
)

Rows = tuple[Tensor, ...]


class SDEMethod(Method):
    r"""One step for :math:`dh = m\,dt,\; dm = (-\gamma m + f(h, t))\,dt + s\,dW`.

    All that depends on γ and η is in the coefficients of a step, which end with its standard normal variables. So the
    gradient with respect to them is exact.

    Attributes:
        reach: the largest γH for which the law of a step is near that of the equation.
    """

    rows = 2
    reach = math.inf

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """The coefficients for all intervals, (coefficients, intervals, ...).

        Arguments:
            gamma: γ, (...), filled up with the dimensions of h or without any.
            scale: s = √(2γη), (...).
            size: H, (intervals, ...).
        """
        raise NotImplementedError

    def unpack(self, packed: Tensor, dims: int, *, error: bool = False) -> Rows:
        """The coefficients of one interval."""
        return packed.unbind(0)


class UBU(SDEMethod):
    r"""Half a flight with noise, a kick, half a flight: strong order 2 with one evaluation of f a step.

    References:
        Sanz-Serna and Zygalakis, Wasserstein distance estimates for the distributions of numerical approximations to
        ergodic stochastic differential equations, Journal of Machine Learning Research (2021).
    """

    nodes = (0.5,)

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Those of half a flight, a, b, i, j₁, j₂, and the time of the kick."""
        a, b, p, q, r = free_flight(gamma, size / 2)
        return torch.stack(torch.broadcast_tensors(a, b, scale * p, scale * q, scale * r, size))

    def step(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: Field, **_: Any) -> Step:
        """One step, with the time of its evaluation."""
        (h, m), (*flight, kick, noise) = state, coefficients
        h, m = fly(h, m, flight, noise[:2])
        m = torch.addcmul(m, kick, field(times[0], h))
        return Step(fly(h, m, flight, noise[2:]))

    def undo(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: Field) -> Rows:
        """What a step started from."""
        (h, m), (*flight, kick, noise) = state, coefficients
        h, m = fly_back(h, m, flight, noise[2:])
        m = torch.addcmul(m, kick, field(times[0], h), value=-1)
        return fly_back(h, m, flight, noise[:2])


class BAOAB(SDEMethod):
    r"""Half a kick, half a drift, damping with noise, half a drift, half a kick; one evaluation of f a step.

    Its strong order is 1 and its weak order 2. Its stationary law is closer to that of the equation than those of the
    other splittings.

    References:
        Leimkuhler and Matthews, Rational construction of stochastic numerical methods for molecular sampling, Applied
        Mathematics Research Express (2012), doi:10.1093/amrx/abs010.
    """

    nodes, carries = (1.0,), True

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Those of a flight, a, b, i, j₁, and the time of half a kick."""
        _, b, p, _, _ = free_flight(gamma, size)
        i = scale * p
        return torch.stack(torch.broadcast_tensors(size * (1 + b) / 2, b, i, size * i / 2, size / 2))

    def step(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: Field, **_: Any) -> Step:
        """One step, with the time of its evaluation."""
        (h, m, f), (*flight, kick, noise) = state, coefficients
        h, m = fly(h, torch.addcmul(m, kick, f), flight, noise)
        f = field(times[0], h)
        return Step((h, torch.addcmul(m, kick, f), f))

    def undo(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: Field) -> Rows:
        """What a step started from."""
        (h, m, f), (*flight, kick, noise) = state, coefficients
        h, m = fly_back(h, torch.addcmul(m, kick, f, value=-1), flight, noise)
        f = field(times[0], h)
        return h, torch.addcmul(m, kick, f, value=-1), f


def fly(h: Tensor, m: Tensor, flight: Sequence[Tensor], noise: Tensor) -> Rows:
    """A flight h ← h + a m + j₁ ξ₁ + j₂ ξ₂, m ← b m + i ξ₁; without j₂ where it has one variable."""
    a, b, i, *j = flight
    h = torch.addcmul(h, a, m)
    for weight, normal in zip(j, noise.unbind(0), strict=True):
        h = torch.addcmul(h, weight, normal)
    return h, torch.addcmul(b * m, i, noise[0])


def fly_back(h: Tensor, m: Tensor, flight: Sequence[Tensor], noise: Tensor) -> Rows:
    """What a flight started from."""
    a, b, i, *j = flight
    m = torch.addcmul(m, i, noise[0], value=-1) / b
    for weight, normal in zip(j, noise.unbind(0), strict=True):
        h = torch.addcmul(h, weight, normal, value=-1)
    return torch.addcmul(h, a, m, value=-1), m


class ShiftedNystrom(SDEMethod):
    r"""The shifted ODE method over a step of ``"nystrom4"``: strong order 3 with three evaluations of f a step.

    With the increment W of the Brownian motion B over a step of size H and the two integrals

        L = (1/H) ∫ (B - tW/H) dt,   K = (1/H²) ∫ (B - tW/H)(H/2 - t) dt,

    independent of each other with the variances H, H/12 and H/720, a step is m ← m + s(L + 6K), then a step of
    h'' + γh' = f(h, t) + s(W - 12K)/H, then m ← m - s(L - 6K).

    References:
        Foster, Lyons and Oberhauser, The shifted ODE method for underdamped Langevin MCMC, arXiv:2101.03446.
    """

    ode, carries = NYSTROM["nystrom4"], True
    nodes = ode.nodes
    reach = 2.0  # for a spring, the stationary variance of h is 0.2 % off at 1, 10 % at 2 and 83 % at 4

    def coefficients(self, gamma: Tensor, scale: Tensor, size: Tensor) -> Tensor:
        """Those of the step of the ODE, then the factors of W and K in the force, and of L and K in the momentum."""
        gamma, scale, size = torch.broadcast_tensors(gamma, scale, size)
        of_w, of_l, of_k = (scale * (size * variance).sqrt() for variance in (1.0, 1 / 12, 1 / 720))
        noise = torch.stack([of_w / size, -12 * of_k / size, of_l, 6 * of_k])
        return torch.cat([self.ode.packed(torch, gamma, size, error=False), noise])

    def unpack(self, packed: Tensor, dims: int, *, error: bool = False) -> Rows:
        """The coefficients of one interval."""
        return (*self.ode.unpack(packed[:-4], dims, error=False), *packed[-4:])

    def step(self, state: Rows, coefficients: Rows, times: Sequence[Tensor], field: Field, **_: Any) -> Step:
        """One step; the value that it carries is that of f without the noise."""
        *of_ode, by_w, by_k, of_l, of_k, noise = coefficients
        (h, m, f), (w, bridge, skew) = state, noise
        push = by_w * w + by_k * skew

        def pushed(t: Tensor, x: Tensor) -> Tensor:
            nonlocal f
            f = field(t, x)
            return f + push

        start = (h, m + of_l * bridge + of_k * skew, f + push)
        h, m = self.ode.step(start, tuple(of_ode), times, pushed).state[:2]
        return Step((h, m - of_l * bridge + of_k * skew, f))


NATIVE: dict[str, SDEMethod] = {"ubu": UBU(), "baoab": BAOAB(), "nystrom4": ShiftedNystrom()}
SPLITTINGS = ("ubu", "baoab")


class SDEProblem(Problem):
    """A heavy-ball SDE with its method and steps; draws the noise of each step.

    Arguments:
        term: the right-hand side, of second order.
        method: its name.
        t: times (T,), checked.
        counts: how many steps there are in each interval.
        noise: the standard normal variables of a step, (normals, ...), by its number.

    Attributes:
        gamma: the coefficients of all intervals, through which the gradients of γ and η go.
    """

    def __init__(self, term: ODETerm, method: str, t: Tensor, counts: np.ndarray, noise: SeededNoise | Any) -> None:
        temperature = term.aligned(term.inner.solver_temperature(), "temperature", "η")
        term.per_channel = True  # rows keep the shape of h
        of_sde = NATIVE[method]
        term.damping = torch.as_tensor(term.damping, dtype=torch.float64, device="cpu")
        super().__init__(term, of_sde, t, Settings(method, steps=1))
        self.noise, self._counts, self._ends = noise, counts.tolist(), counts.cumsum()
        gamma, eta = term.damping, torch.as_tensor(temperature, dtype=torch.float64, device="cpu")
        self.strongest_decay = _torch.to_numpy(gamma).max(initial=0.0)
        sizes = np.diff(self.grid()) / counts
        if self.strongest_decay * sizes.max(initial=0.0) > of_sde.reach:
            raise ValueError(
                f"method={method!r} needs steps of at most {of_sde.reach:g}/γ, got a damping of "
                f"{self.strongest_decay:g} and steps of {sizes.max():g}. "
                f"Fix: dt={of_sde.reach / self.strongest_decay:.2g}, or method='ubu', which solves the damping exactly."
            )
        size = torch.from_numpy(sizes).reshape(-1, *[1] * max(gamma.dim(), eta.dim()))
        self.gamma = of_sde.coefficients(gamma, diffusion(gamma, eta), size).to(self.template)

    def counts(self) -> Sequence[int]:
        """How many steps there are in each interval."""
        return self._counts

    def coefficients(self, attempt: Attempt) -> tuple[Rows, None]:
        """Those of the interval in which the steps are."""
        assert isinstance(self.gamma, Tensor)
        interval = int(self._ends.searchsorted(attempt.number, "right"))
        return self.method.unpack(self.gamma[:, interval], self.dims, error=False), None

    def not_finite(self, attempt: Attempt, state: Rows, lane: tuple[int, ...] = ()) -> SolverError:
        """The error for a step that is not finite."""
        found = super().not_finite(attempt, state)
        message = found.message.replace(" (method", ". Fix: a smaller dt (method")
        return NonFiniteError(message, t=found.t, step_size=found.step_size, nfe=found.nfe)

    def check_growth(self) -> None:
        """Refuse to undo a decay by e^{-γT} that takes all digits."""
        dtype, longest = self.template.dtype, np.diff(self.grid()).max(initial=0.0)
        eps, growth = torch.finfo(dtype).eps, self.strongest_decay * longest
        if math.log(eps) + growth > math.log(UNDONE):
            message = (
                f"undoing the damping of {self.strongest_decay:g} over {longest:g} between two output times grows "
                f"rounding errors, {eps:.1g} in {dtype}, by e^{growth:.3g}; expected less than {UNDONE:g} of the "
                "state. Fix: gradient='checkpoint', float64, or output times closer together"
            )
            raise self.failure(ReversalError, message, self.begin, math.nan)


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

    The native methods solve the linear part with its noise exactly:

    - ``"ubu"``: half a flight, a kick by f, half a flight. Strong order 2, one evaluation of f a step.
    - ``"baoab"``: strong order 1, weak order 2, one evaluation a step. Of the three it has the stationary law that is
      closest to that of the equation.
    - ``"nystrom4"``: the shifted ODE method with the steps of ``odeint``'s ``"nystrom4"``. Strong order 3, three
      evaluations a step. It needs γ dt of at most 2.

    Their steps end on the output times: each interval between two output times is divided into the least number of
    equal steps that are no longer than ``dt``. torchsde's methods take steps of ``dt`` from the first time on and
    interpolate the output linearly.

    The gradients of the native methods are exact for the numbers that were computed, with respect to the state, the
    parameters of f, γ and η, at fixed standard normal variables. ``"direct"`` backpropagates through the steps.
    ``"checkpoint"`` keeps the graph up to 64 MiB and takes later steps again. ``"reversible"`` keeps the output alone
    and undoes the steps. Both draw the noise again from its seed. Undoing a step grows rounding errors by e^{γH}, so
    ``"reversible"`` refuses an interval between output times in which they would exceed 1e-4: γ times the interval
    may be at most 6.7 in float32 and 26 in float64.

    The noise of a step depends on the seed, the number of the step, the shape and the dtype, and is the same on every
    device of a kind.

    References:
        Sanz-Serna and Zygalakis (2021) for UBU; Leimkuhler and Matthews, doi:10.1093/amrx/abs010, for BAOAB; Foster,
        Lyons and Oberhauser, arXiv:2101.03446, for the shifted ODE method; Li et al., arXiv:2001.01328, for torchsde.

    Arguments:
        sde: the equation.
        y0: initial ``(h, m)``, of one shape (batch, ...); ``sde.initial_state(x)`` makes it.
        t: output times, (T,), strictly increasing, in the units of time of γ. The first is the time of ``y0``.
        method: ``"ubu"``, ``"baoab"``, ``"nystrom4"``, or one of torchsde's, ``"euler"``, ``"milstein"``, ``"srk"``,
            ``"midpoint"``, ``"heun"``, ``"euler_heun"``, ``"log_ode"``, ``"reversible_heun"``. Default: ``"ubu"``.
        dt: the longest step, in units of time. A step may be 1 % longer where the times are rounded.
        gradient: ``"direct"``, ``"checkpoint"`` or ``"reversible"`` (not for ``"nystrom4"``), or an object of
            ``hbnode.solve.adjoints``, ``Checkpoint(keep_bytes=0)`` for instance; with torchsde's methods ``"direct"``
            or ``"adjoint"``, which is ``torchsde.sdeint_adjoint``. Default: ``"direct"``.
        seed: a whole number that determines the noise; None draws one from torch's generator. Default: None.
        noise: the noise itself, for a native method, in place of a seed. Default: None.

    Returns:
        The trajectories ``(h, m)`` at the times, time first: (T, batch, ...) each.

    Raises:
        ValueError: an argument is out of its range, or f returns another shape.
        TypeError: an argument has the wrong type or dtype.
        NonFiniteError: the state or f became infinite or NaN.
        ReversalError: rounding errors grow too much to undo the steps of ``"reversible"``, or the errors of the steps
            too much for torchsde's ``"adjoint"``.

    Example:
        >>> import torch, hbnode
        >>> sde = hbnode.HeavyBallSDE(torch.nn.Linear(2, 2), temperature=0.1)
        >>> state = sde.initial_state(torch.randn(64, 2))
        >>> h, m = hbnode.sdeint(sde, state, [0.0, 0.5, 1.0], dt=0.1, gradient="reversible", seed=0)
        >>> h.shape
        torch.Size([3, 64, 2])
        >>> h[-1].square().mean().backward()
    """
    name, dt = _check_names(sde, method, gradient, noise, seed), checked_step(dt)
    if is_tracing():
        raise ValueError("sdeint cannot be a part of a traced or exported graph. Fix: call it outside of the graph.")
    state: Any = checked_state(sde, y0, Snapshot(sde))
    term = ODETerm(sde, state, Tally(sde, NFE()), second_order=True)
    times = checked_output_times(t, term.template.device)
    if method not in NATIVE:
        return torchsde.solve(term, state, times, dt, method, name, seed)
    if not is_heavy_ball(sde, HeavyBallSDE):
        raise ValueError(
            f"method={method!r} evaluates func without a call of the SDE, which has hooks or a forward of its own. "
            "Fix: put them into func, or method='srk'."
        )
    h, on_host = term.template, _torch.to_numpy(times)
    counts = step_counts(on_host, dt)
    if noise is not None and name == "reversible" and noise.normals.requires_grad:
        raise ValueError("noise.normals requires a gradient. Fix: gradient='direct', or detach it.")
    normals = (
        SeededNoise(seed, (NORMALS[method], *h.shape), h) if noise is None else noise.of(method, on_host, counts, h)
    )
    problem, adjoint, snapshot = SDEProblem(term, method, times, counts, normals), chosen(gradient), Snapshot(sde)
    if name == "reversible" and torch.is_grad_enabled():
        problem.check_growth()
    with solving(snapshot, h.device.type):
        rows = adjoint.solve(problem, state, snapshot)
        check_finite(problem, state, rows)
    h, m = term.unflatten(rows, (len(times),))
    return h, m


def _check_names(sde: object, method: str, gradient: object, noise: BrownianIncrements | None, seed: int | None) -> str:
    """The name of the gradient; refuses a method and a gradient that are not known or do not go together."""
    check_sde(sde)
    methods = (*get_args(NativeSDEMethod), *get_args(TorchsdeMethod))
    if method not in methods:
        near = f"method={nearest(method, methods) or 'ubu'!r}"
        fix = f"{near}, or hbnode.odeint, which leaves the noise out" if method in get_args(ODEMethodName) else near
        raise ValueError(f"unknown method {method!r}; expected one of {methods}. Fix: {fix}.")
    names = {kind: name for name, kind in GRADIENTS.items()}
    name = gradient if isinstance(gradient, str) else names.get(type(gradient), gradient)
    if name not in (gradients := gradients_of(method)):
        fix = f"gradient={nearest(name, gradients) or 'direct'!r}"
        if name == "reversible":
            fix = "method='ubu' with gradient='reversible', or gradient='direct'"
        elif name == "adjoint":
            fix = "gradient='checkpoint', which is exact"
        raise ValueError(
            f"gradient={gradient!r} is not for method={method!r}; expected one of {gradients}. Fix: {fix}."
        )
    if noise is not None and not isinstance(noise, BrownianIncrements):
        raise TypeError(
            f"noise must be BrownianIncrements, got {type(noise).__name__}. Fix: hbnode.BrownianIncrements.draw(...)."
        )
    if noise is not None and method not in NATIVE:
        raise ValueError(
            f"noise is for {tuple(NATIVE)}, got method={method!r}. "
            "Fix: torchsde.sdeint(sde, torch.cat([h, m], -1), t, bm=...)."
        )
    if noise is not None and seed is not None:
        raise ValueError("seed and noise are both given, and both determine the noise. Fix: leave seed out.")
    return name


def gradients_of(method: str) -> tuple[Gradient, ...]:
    """What ``gradient=`` may be for a method."""
    if method not in NATIVE:
        return "direct", "adjoint"
    return ("direct", "checkpoint", "reversible") if method in SPLITTINGS else ("direct", "checkpoint")
