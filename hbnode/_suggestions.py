"""What to write in place of a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_SCIPY = {"lsoda": "LSODA", "radau": "Radau", "bdf": "BDF"}
_SYNONYMS = {  # of scipy, MATLAB, torchdyn, torchode, diffrax
    **dict.fromkeys(("rk45", "ode45", "dopri", "dormandprince"), "dopri5"),
    **dict.fromkeys(("dop853", "dormandprince8"), "dopri8"),
    **dict.fromkeys(("rk23", "ode23"), "bosh3"),
    **dict.fromkeys(("tsitouras", "tsitouras45"), "tsit5"),
    **dict.fromkeys(("verlet", "stormerverlet", "alf", "asynchronousleapfrog"), "leapfrog"),
    **{"heun": "heun2", "rkn": "nystrom8", "scipy": "scipy_solver"},
    **dict.fromkeys(_SCIPY, "scipy_solver"),
    # gradients
    **dict.fromkeys(("autograd", "autodiff", "backprop", "backpropagation", "autodiffadjoint"), "direct"),
    **dict.fromkeys(("aca", "recompute", "recursivecheckpointadjoint"), "checkpoint"),
    **dict.fromkeys(("backsolve", "backsolveadjoint", "continuous", "interpolatedadjoint"), "adjoint"),
    **dict.fromkeys(("invertible", "symplectic"), "reversible"),
    # rules of recurrent layers
    **dict.fromkeys(("nesterov", "nesterovs", "nesterovmomentum"), "nag"),
    **dict.fromkeys(("sr", "srnag", "scheduledrestart"), "restart"),
    **dict.fromkeys(("heavyball", "sgd", "polyak"), "momentum"),
    "adaptivemomentum": "adaptive",
    # save
    **dict.fromkeys(("land", "onto", "stepto"), "exact"),
    **dict.fromkeys(("dense", "linear", "spline"), "interpolate"),
}
_OF_SDEINT = ("ubu", "baoab", "srk", "milstein", "euler_heun", "log_ode", "reversible_heun")


def nearest(name: object, names: Sequence[str]) -> str | None:
    """The one of ``names`` that was most likely meant, None if none is near."""
    plain = "".join(filter(str.isalnum, str(name).lower()))
    if _SYNONYMS.get(plain) in names:
        return _SYNONYMS[plain]
    return next(iter(difflib.get_close_matches(plain, names, 1)), None)


def nearest_method(name: object, methods: Sequence[str]) -> str:
    """What to write in place of an unknown method."""
    if name in _OF_SDEINT:
        return f"hbnode.sdeint(sde, y0, t, method={name!r}, dt=...) for a HeavyBallSDE; else method=None"
    solver = _SCIPY.get(str(name).lower())
    if solver is not None:
        return f"method='scipy_solver' with options={{'solver': {solver!r}}} and gradient='adjoint'"
    near = nearest(name, methods)
    return f"method={near!r}, or method=None for the best there is" if near else "method=None for the best there is"
