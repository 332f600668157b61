"""Whether constant gates keep a memory with a delta rule bounded.

Along one key of norm 1, between other keys that are orthogonal to it, the memory S and the velocity P follow

    key shown      P ← μP − ηρS,  S ← αS + sP          ρ = α, or 1 where the plain memory is read
    other keys     P ← μP,        S ← αS + sP.

A key that is shown a few times in a row, then rests, then is shown again, drives a resonance: P goes on moving S while
the key rests, and arrives with the wrong sign.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch

LONGEST_BURST = 128
LONGEST_REST = 1024


def warn_unless_stable(
    log_momentum: object,
    log_decay: object,
    step: object,
    write: object,
    *,
    decayed: bool = True,
    stacklevel: int = 1,
) -> None:
    """Warn if constant gates let a memory with a delta rule grow without bound for keys of norm 1.

    Gates that are not all numbers are passed over: they are not constant, or not known without waiting for a device.

    Arguments:
        log_momentum: log μ; None is no momentum.
        log_decay: log α; None is α = 1.
        step: s; None is 1 − μ.
        write: η; None is 1.
        decayed: whether the error is that of the decayed memory.
        stacklevel: as that of :func:`warnings.warn`, from the caller of this function.
    """
    mu = 0.0 if log_momentum is None else _exp(log_momentum)
    alpha = 1.0 if log_decay is None else _exp(log_decay)
    s = (None if mu is None else 1 - mu) if step is None else step
    eta = 1.0 if write is None else write
    if mu is None or alpha is None or not isinstance(s, (int, float)) or not isinstance(eta, (int, float)):
        return
    reason = unbounded(mu, alpha, s * eta, decayed)
    if reason:
        warnings.warn(
            f"heavy_ball_memory with momentum {mu:.4g}, decay {alpha:.4g}, step {s:.4g} and write {eta:.4g} {reason}. "
            f"Fix: step * write <= {_limit(mu, alpha, decayed):g}, or a tensor of gates if they are meant.",
            stacklevel=stacklevel + 1,
        )


def _exp(log_gate: object) -> float | None:
    """A gate from its logarithm; None if it is no number."""
    return math.exp(log_gate) if isinstance(log_gate, (int, float)) else None


@functools.lru_cache(maxsize=256)
def _limit(mu: float, alpha: float, decayed: bool) -> float:
    """A large s η that is safe, in three digits."""
    gain = min(3 * (1 - mu) ** 2, 1.99 * (1 - mu))
    while unbounded(mu, alpha, float(f"{gain:.3g}"), decayed):
        gain *= 0.98
    return float(f"{gain:.3g}")


@functools.lru_cache(maxsize=256)
def unbounded(mu: float, alpha: float, gain: float, decayed: bool = True) -> str:
    """What makes a memory grow without bound, in words; an empty string if nothing is known to.

    Arguments:
        mu: μ in [0, 1].
        alpha: α in [0, 1].
        gain: s η.
        decayed: whether the error is that of the decayed memory.
    """
    if gain <= 0:
        return ""
    if alpha == 1:
        if gain >= 2 * (1 - mu):
            return "grows without bound: step * write / (1 - momentum) is not below 2"
        if gain > 3 * (1 - mu) ** 2 * (1 + 1e-9):  # rounded gates may sit on the edge
            return "may grow without bound where keys are repeated: step * write is above 3 (1 - momentum)^2"
        return ""
    found = resonance(mu, alpha, gain, decayed)
    if found is None:
        return ""
    return f"grows without bound where a key is shown {found[0]} times, then not for {found[1]} steps, and so on"


def resonance(mu: float, alpha: float, gain: float, decayed: bool = True) -> tuple[int, int] | None:
    """A burst and a rest, in steps, whose repetition makes a memory grow; None if none is found.

    The product of a burst's and a rest's matrices has a determinant d in [0, 1], and an eigenvalue outside of the unit
    circle if and only if its trace is above 1 + d in size. The product does not depend on how s and η share the gain.

    Arguments:
        mu: μ in [0, 1].
        alpha: α in [0, 1].
        gain: s η.
        decayed: whether the error is that of the decayed memory.
    """
    rest = [(1.0, 0.0, 1.0)]  # [[a, c], [0, m]], the matrix of a rest with s = 1
    for _ in range(LONGEST_REST):
        a, c, m = rest[-1]
        rest.append((alpha * a, alpha * c + mu * m, mu * m))
    a_n, c_n, m_n = torch.tensor(rest, dtype=torch.float64, device="cpu").unbind(1)
    read = gain * (alpha if decayed else 1.0)
    s_s, s_p, p_s, p_p = 1.0, 0.0, 0.0, 1.0  # the matrix of a burst
    for burst in range(1, LONGEST_BURST + 1):
        p_s, p_p = mu * p_s - read * s_s, mu * p_p - read * s_p
        s_s, s_p = alpha * s_s + p_s, alpha * s_p + p_p
        trace = a_n * s_s + c_n * p_s + m_n * p_p
        determinant = (s_s * p_p - s_p * p_s) * a_n * m_n
        excess = trace.abs() - 1 - determinant
        if excess.max() > 1e-9:
            return burst, int(excess.argmax())
    return None
