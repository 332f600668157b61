"""The eigenvalues of a field's Jacobian along a solution, and the effect of damping on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._tree import State, describe, parts
from hbnode.diagnostics._shared import Result, axes, check_block, evaluation_mode, legend, states, style
from hbnode.fields import GHBNODE, HBNODE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODES = 8  # number of Gauss-Legendre nodes for the mean of the Jacobian over the time span
MOST_ENTRIES = 2**25  # maximum number of entries in the Jacobians of all samples, which then take 256 MiB


@dataclass(frozen=True, eq=False)
class Spectrum(Result):
    r"""The eigenvalues of the Jacobian of a block's first-order system, for each sample.

    Attributes:
        eigenvalues: complex128 (batch, n), in units of 1/time. n is the size of one sample's state: d for a state h,
            2d for a state (h, m). For :class:`hbnode.HBNODE` and :class:`hbnode.GHBNODE` with one damping γ, the
            entries 2i and 2i + 1 are a pair with the sum -γ.
        damping: the damping γ; None for a field without damping, or with one γ per feature.
    """

    eigenvalues: Tensor
    damping: float | None

    @property
    def pairs(self) -> Tensor:
        """The eigenvalues in pairs with the sum -γ, where γ is the damping; shape (batch, n / 2, 2).

        Raises:
            ValueError: if the field has no damping, or one γ per feature, because such pairs then do not exist.
        """
        if self.damping is None:
            raise ValueError("pairs needs an HBNODE or GHBNODE with one damping γ, got none. Fix: .eigenvalues.")
        return self.eigenvalues.unflatten(1, (-1, 2))

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return the columns ``sample``, ``real`` and ``imag``, with one row per eigenvalue."""
        batch, n = self.eigenvalues.shape
        flat = self.eigenvalues.reshape(-1)
        samples = torch.arange(batch).repeat_interleave(n)
        return {"sample": samples.tolist(), "real": flat.real.tolist(), "imag": flat.imag.tolist()}

    def plot(self, ax: Axes | None = None, **kwargs: Any) -> Axes:
        r"""Draw the eigenvalues in the complex plane.

        For a field with one damping γ, open circles show the eigenvalues for zero damping. Lines show their paths as
        the damping grows to γ, which moves the centre of every pair to -γ/2.

        Arguments:
            ax: matplotlib axes; None creates a figure. Default: None.
            kwargs: passed to ``Axes.plot`` for the eigenvalues.

        Returns:
            The axes.
        """
        ax = axes(ax)
        points: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4}
        found = {**points, "color": "C0"}
        if damping := self.damping:
            product = self.pairs.prod(-1).reshape(-1)
            gammas = torch.linspace(0.0, damping, 101, dtype=torch.float64)[:, None]
            root = (gammas**2 / 4 - product).sqrt()  # a pair solves λ² + γλ + product = 0
            paths = torch.cat([-gammas / 2 + root, -gammas / 2 - root], dim=1)
            ax.plot(paths.real, paths.imag, color="0.7", linewidth=0.8, zorder=1)
            without = {**points, "color": "0.5", "markerfacecolor": "none", "zorder": 1.5, "label": "without damping"}
            ax.plot(paths[0].real, paths[0].imag, **without)
            label = rf"$-\gamma/2 = {-damping / 2:.3g}$"
            ax.axvline(-damping / 2, color="C1", linestyle="--", linewidth=1, label=label)
            found["label"] = "eigenvalues"
        ax.plot(self.eigenvalues.real.reshape(-1), self.eigenvalues.imag.reshape(-1), **style(found, kwargs))
        ax.axvline(0.0, color="0.8", linewidth=0.8, zorder=0)
        ax.set(xlabel="real part (1/time)", ylabel="imaginary part (1/time)")
        legend(ax)
        return ax


def spectrum(block: nn.Module, x: Any, t: float | None = None) -> Spectrum:
    r"""Compute the eigenvalues of the Jacobian of a block's first-order system, for each sample.

    If the Jacobian of the system is a constant H, the adjoint of a sample is :math:`a(t) = a(T)\, e^{(T - t) H}`. An
    eigenvalue with real part r then multiplies its component of the gradient by :math:`e^{r (T - t)}`. Proposition 4
    defines H as the mean of the Jacobian over the time span,

    .. math:: H = \frac{1}{T - t_0} \int_{t_0}^T
        \begin{pmatrix} 0 & \sigma'(m) \\ \partial f/\partial h - \xi I & -\gamma I \end{pmatrix} ds,

    with the damping γ, the coefficient ξ and the activation σ of :class:`hbnode.GHBNODE`. An HBNODE has ξ = 0 and
    σ'(m) = 1. The eigenvalues of H form pairs with the sum -γ. Half of them have a real part of at least -γ/2, so for
    a small γ half of the gradient cannot vanish fast. In a NODE, all eigenvalues of :math:`\partial f/\partial h` can
    have large negative real parts.

    The block is evaluated in evaluation mode, and its samples must be independent of each other. ``block.nfe`` does
    not change. An open :class:`hbnode.count_nfe` or :class:`hbnode.diagnostics.record_steps` includes the evaluations
    and steps of this call.

    References:
        Proposition 4 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022).

    Arguments:
        block: an :class:`hbnode.ODEBlock`.
        x: input batch (batch, d, ...).
        t: time at which the Jacobian is evaluated, on the solution that starts with x at the start of ``t_span``. None
            takes the mean over ``t_span``, by Gauss-Legendre quadrature with 8 nodes. Default: None.

    Returns:
        The eigenvalues, with ``.plot()`` and ``.to_csv(path)``.

    Raises:
        TypeError: if ``block`` is not an ODEBlock.
        ValueError: if the state has no batch dimension or no features, or the Jacobians of all samples have more than
            2^25 entries.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(3, 3), damping=0.25, learn_damping=False)
        >>> found = hbnode.diagnostics.spectrum(block, torch.randn(5, 3))
        >>> torch.allclose(found.pairs.sum(-1), torch.full((5, 3), -0.25, dtype=torch.complex128))
        True
    """
    block = check_block(block, "spectrum")
    first, last = block.t_span
    if t is None:
        nodes, weights = np.polynomial.legendre.leggauss(NODES) / np.array([[1], [2]])  # weights sum to 1
        times, path = states(block, x, [first, *(first + (last - first) * (nodes + 1) / 2), last])
        chosen = range(1, len(times) - 1)
    else:
        weights = np.ones(1)
        times, path = states(block, x, [first, float(t) if t != first else last])
        chosen = range(1) if t == first else range(1, 2)
    if path[0].dim() < 3 or 0 in path[0].shape[2:]:
        got, fix = describe(path[0][0]), "x.unsqueeze(0) for one sample, x.unsqueeze(1) for one feature"
        raise ValueError(f"spectrum needs a state of shape (batch, d, ...), got {got}. Fix: {fix}.")
    batch, n = path[0].shape[1], sum(part.shape[2:].numel() for part in path)
    largest = max(MOST_ENTRIES // n**2, 1)
    if batch > largest:
        fault = f"{batch} samples need Jacobians of {n} × {n} entries, more than {MOST_ENTRIES} in all"
        raise ValueError(f"{fault}. Fix: x[:{largest}].")
    matrix = torch.zeros(batch, n, n, dtype=torch.float64)
    with evaluation_mode(block):
        for i, weight in zip(chosen, weights.tolist(), strict=True):
            matrix += weight * jacobian(block.field, times[i], tuple(part[i] for part in path))
    eigenvalues = torch.linalg.eigvals(matrix)
    damping = block.field.damping if isinstance(block.field, (HBNODE, GHBNODE)) else None
    if isinstance(damping, Tensor):
        damping = float(damping.detach()) if damping.numel() == 1 else None
    return Spectrum(eigenvalues if damping is None else pair_eigenvalues(eigenvalues, damping), damping)


def jacobian(field: nn.Module, t: Tensor, state: tuple[Tensor, ...]) -> Tensor:
    """Return the Jacobian of a field with respect to the state (n numbers per sample) at time t.

    The shape is (batch, n, n). The dtype is float64, on the CPU.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [part.detach().clone().requires_grad_() for part in state]
        value: State = field(t.clone().to(leaves[0]), leaves[0] if len(leaves) == 1 else tuple(leaves))
        flat = torch.cat([part.unsqueeze(-1).flatten(1) for part in parts(value)], dim=1)
        rows = []
        for summed in flat.sum(0):  # the gradient of a sum over samples holds the gradient of each sample
            if summed.requires_grad:
                found = torch.autograd.grad(summed, leaves, retain_graph=True, materialize_grads=True)
            else:  # this component of the field is constant
                found = tuple(torch.zeros_like(leaf) for leaf in leaves)
            rows.append(torch.cat([g.unsqueeze(-1).flatten(1) for g in found], dim=1))
    return torch.stack(rows, dim=1).to("cpu", torch.float64)


def pair_eigenvalues(eigenvalues: Tensor, damping: float) -> Tensor:
    """Sort eigenvalues (batch, n) so that entries 2i and 2i + 1 are a pair whose sum is closest to ``-damping``."""
    ordered = torch.empty_like(eigenvalues)
    for into, row in zip(ordered, eigenvalues, strict=True):
        left, pairs = list(range(len(row))), []
        distance = (row[:, None] + row[None, :] + damping).abs().fill_diagonal_(torch.inf)
        while left:
            first = left.pop(0)
            second = left[int(distance[first, left].argmin())]
            left.remove(second)
            pairs += [first, second]
        into[:] = row[pairs]
    return ordered
