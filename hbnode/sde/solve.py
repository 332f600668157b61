"""``hbnode.sdeint``: the one way to solve a heavy-ball SDE."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hbnode import _torch_internals
from hbnode._arguments import checked_state
from hbnode._closures import closed_over_leaves
from hbnode._recompute import ForwardContext, random_state, solving
from hbnode._state import Times, parts
from hbnode._suggestions import nearest
from hbnode._tracing import is_tracing, untraced
from hbnode.nets import SolveDropout
from hbnode.nfe import NFE, Tally
from hbnode.sde import torchsde_solve
from hbnode.sde.field import HeavyBallSDE
from hbnode.sde.gradients import Checkpoint, Reversible, check_growth
from hbnode.sde.grid import StepGrid, checked_output_times, checked_step
from hbnode.sde.methods import NATIVE, SPLITTINGS
from hbnode.sde.names import NativeSDEMethod, SDEMethodName, TorchsdeMethod
from hbnode.sde.noise import BrownianIncrements, SeededNoise, check_sde, checked_seed
from hbnode.sde.run import ForwardPass, Run
from hbnode.solvers.names import Gradient, Method
from hbnode.solvers.ode_term import ODETerm, is_heavy_ball, unwrapped
from hbnode.solvers.stepper import no_autocast

_FUNCTIONS: dict[str, Any] = {"checkpoint": Checkpoint, "reversible": Reversible}


def sdeint(
    sde: HeavyBallSDE,
    y0: tuple[Tensor, Tensor],
    t: Times,
    *,
    method: SDEMethodName = "ubu",
    dt: float,
    gradient: Gradient = "direct",
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
    ``"checkpoint"`` keeps (h, m) before every step and takes the steps again. ``"reversible"`` keeps the output alone
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
        gradient: ``"direct"``, ``"checkpoint"`` or ``"reversible"`` (not for ``"nystrom4"``); with torchsde's methods
            ``"direct"`` or ``"adjoint"``, which is ``torchsde.sdeint_adjoint``. Default: ``"direct"``.
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
    _check_names(sde, method, gradient, noise, seed)
    dt = checked_step(dt)
    if is_tracing() and not torch.compiler.is_dynamo_compiling():
        raise ValueError("sdeint cannot be a part of a traced or exported graph. Fix: call it outside of the graph.")
    return _solve(sde, y0, t, method, dt, gradient, seed, noise)


def _check_names(
    sde: object, method: object, gradient: object, noise: BrownianIncrements | None, seed: int | None
) -> None:
    """Refuse a method and a gradient that are not known or do not go together."""
    check_sde(sde)
    methods = (*get_args(NativeSDEMethod), *get_args(TorchsdeMethod))
    if method not in methods:
        near = f"method={nearest(method, methods) or 'ubu'!r}"
        fix = f"{near}, or hbnode.odeint, which leaves the noise out" if method in get_args(Method) else near
        raise ValueError(f"unknown method {method!r}; expected one of {methods}. Fix: {fix}.")
    gradients = ("direct", "adjoint")
    if method in NATIVE:
        gradients = ("direct", "checkpoint", *(("reversible",) if method in SPLITTINGS else ()))
    if gradient not in gradients:
        fix = f"gradient={nearest(gradient, gradients) or 'direct'!r}"
        if gradient == "reversible":
            fix = "method='ubu' with gradient='reversible', or gradient='direct'"
        elif gradient == "adjoint":
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


@untraced
def _solve(
    sde: HeavyBallSDE,
    y0: tuple[Tensor, Tensor],
    t: Times,
    method: str,
    dt: float,
    gradient: str,
    seed: int | None,
    noise: BrownianIncrements | None,
) -> tuple[Tensor, Tensor]:
    """:func:`sdeint` without a graph of torch.compile."""
    state: Any = checked_state(sde, y0)
    state = unwrapped(sde)._pair(state)
    term = ODETerm(sde, state, second_order=True)
    temperature = _temperature(term)
    times = checked_output_times(t, state[0].device)
    nfe = NFE()
    nfe.keeps_graph = gradient == "direct" and torch.is_grad_enabled()
    tally = Tally(sde, nfe)
    if method not in NATIVE:
        if gradient == "adjoint" and torch.is_grad_enabled():
            torchsde_solve.check_adjoint(term.damping, times, dt, method)
        number = checked_seed(seed)
        return torchsde_solve.solve(unwrapped(sde), state, times, dt, method, gradient, number, tally)
    if not is_heavy_ball(sde, HeavyBallSDE):
        raise ValueError(
            f"method={method!r} evaluates func without a call of the SDE, which has hooks or a forward of its own. "
            "Fix: put them into func, or method='srk'."
        )
    h, m = state
    native, grid = NATIVE[method], StepGrid(times, dt)
    if noise is None:
        normals: Any = SeededNoise(checked_seed(seed), (native.normals, *h.shape), h)
    else:
        normals = noise.of(method, grid, h)
        if gradient != "direct" and noise.normals.requires_grad:
            raise ValueError("noise.normals requires a gradient. Fix: gradient='direct', or detach it.")
    run = Run(method, native, term, grid, normals, grid.times(native.nodes, h), tally)
    damping, coefficients = _coefficients(run, temperature)
    with solving(sde), no_autocast(h.device.type):
        if gradient == "direct" or not torch.is_grad_enabled():
            trajectory = run.integrate(coefficients, h, m)
        else:
            trajectory = _with_function(run, gradient, coefficients, damping, h, m)
        run.check_finite(coefficients, [_torch_internals.plain(x) for x in trajectory], h, m)
    return trajectory


def _temperature(term: ODETerm) -> Tensor:
    """The temperature, with the dimensions of h or without any."""
    eta, shape = term.inner.solver_temperature(), term.template.shape
    if not isinstance(eta, Tensor):
        return torch.tensor(eta, dtype=torch.float64)
    if eta.dim() > len(shape) or any(a not in (1, b) for a, b in zip(eta.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"the temperature has shape {tuple(eta.shape)}, which does not broadcast to that of h, {tuple(shape)}. "
            "Fix: (d,) for one η a feature, (d, 1, 1) for one a channel."
        )
    return eta.reshape(*[1] * (len(shape) - eta.dim()), *eta.shape)


def _coefficients(run: Run, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The damping on the host, and the coefficients of all intervals where the state is."""
    template = run.term.template
    damping = run.term.damping.to("cpu", torch.float64)
    _check_reach(run, damping)
    product = 2 * damping * temperature.to("cpu", torch.float64)
    # at 0 the slope of the root is infinite, and 0 times it is NaN
    scale = torch.where(product > 0, torch.where(product > 0, product, torch.ones_like(product)).sqrt(), 0.0)
    sizes = torch.tensor(run.grid.sizes, dtype=torch.float64)
    sizes = sizes.reshape(-1, *[1] * product.dim())
    return damping, run.method.coefficients(damping, scale, sizes).to(template.device, template.dtype)


def _check_reach(run: Run, damping: Tensor) -> None:
    """Refuse steps that are too long for the damping, where the method does not solve it exactly."""
    reach, longest = run.method.reach, max(run.grid.sizes, default=0.0)
    if reach < math.inf and damping.numel():
        strongest = float(_torch_internals.plain(damping).max())
        if strongest * longest > reach:
            raise ValueError(
                f"method={run.name!r} needs steps of at most {reach:g}/γ, got a damping of {strongest:g} and steps of "
                f"{longest:g}. Fix: dt={reach / strongest:.2g}, or method='ubu', which solves the damping exactly."
            )


def _with_function(
    run: Run, gradient: str, coefficients: Tensor, damping: Tensor, h: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """The trajectory with a gradient that evaluates f again."""
    if _torch_internals.is_active() or _torch_internals.in_forward_mode():
        raise ValueError(
            f"gradient={gradient!r} does not work under the transforms of torch.func (vmap, grad, jvp, ...), nor in "
            "forward mode. Fix: gradient='direct'."
        )
    if gradient == "reversible":
        check_growth(run, damping, h.dtype)
    forward = _first_evaluation(run, gradient, h)
    if any(x.requires_grad for x in (h, m, coefficients, *forward.leaves)):
        trajectory: tuple[Tensor, Tensor] = _FUNCTIONS[gradient].apply(forward, coefficients, h, m, *forward.leaves)
        return trajectory
    return run.integrate(coefficients, h, m)


def _first_evaluation(run: Run, gradient: str, h: Tensor) -> ForwardPass:
    """Evaluate f where the solve starts, and find all leaves whose gradients its backward pass must find.

    Those are the field's own parameters and whatever else it closes over. A method that carries no value has no other
    use for it.
    """
    term = run.term
    context = ForwardContext(term.field)
    t, leaf = run.start_time(), h.detach().requires_grad_()
    with torch.enable_grad():
        x = leaf.clone()  # of a leaf, torch refuses what is in place in words of its own
    before = random_state(h.device)
    with torch.enable_grad():
        found, state = closed_over_leaves(lambda: run.evaluate(t, x), (t, x))
    if context.changed():
        raise ValueError(
            "func changes its buffers (BatchNorm or spectral_norm in training mode?), and "
            f"gradient={gradient!r} would evaluate it again in the backward pass. "
            "Fix: put that layer in eval mode, use GroupNorm, or gradient='direct'."
        )
    inner = term.inner
    if not all(map(torch.equal, before, random_state(h.device))):
        masks = any(isinstance(module, SolveDropout) for module in inner.modules())
        if not masks:
            raise ValueError(
                f"func draws random numbers, which gradient={gradient!r} cannot draw again. "
                "Fix: gradient='direct', or hbnode.nets.SolveDropout for dropout."
            )
    leaves = list({id(p): p for p in (*context.parameters, *found) if p.requires_grad}.values())
    own = {id(p) for p in context.parameters}
    closed = isinstance(inner.func, nn.Module) and {id(p) for p in found} <= own
    if run.method.carries:
        run.first = parts(state)[0].detach()
    return ForwardPass(run, context, leaves, checks_closures=not closed or inner.time_dependent)
