"""MomentumResNet: a residual network with momentum whose backward pass reverses the layers exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hbnode._checks import as_count, as_real, check_callable, is_one_of
from hbnode._torch import (
    fast_form,
    is_autocast,
    keep_freed_memory,
    needs_reference,
    no_autocast,
    random_state,
    set_random_state,
)
from hbnode.errors import NonFiniteError, ReversalError
from hbnode.fields import with_momentum
from hbnode.solve.adjoints import evaluate_known, vjp

SHIFT = 30  # γ is a multiple of 2^-30; products of two integers below 2^30 fit into int64
MASK = (1 << SHIFT) - 1
LIMIT = 2**61  # of the integers that hold x and v, so that their sum cannot overflow


class MomentumResNet(nn.Module):
    r"""A residual network with momentum whose memory hardly grows with the depth.

    .. math:: v_{n+1} = \gamma v_n + (1 - \gamma) f_n(x_n), \qquad x_{n+1} = x_n + v_{n+1}

    With ``gradient="reversible"`` the backward pass reconstructs :math:`x_n` and :math:`v_n` from the output, and
    evaluates each layer once more. x and v are integer multiples of :math:`2^{-40}` (of :math:`2^{-48}` for float64
    inputs). Sums of integers can be reversed exactly. The product :math:`\gamma v` is rounded down, and the few bits
    that this loses are stored: one per layer and element for :math:`\gamma \ge 1/2`, and :math:`\log_2(1/\gamma)`
    rounded up otherwise. Storing :math:`x_n` in float32 takes 32. The reconstruction is therefore exact, or the
    backward pass raises an error. The integers cost time. On a CPU, a training step with layers of 64 units takes four
    to six times as long as with ``"direct"``. With 512 units it takes less than twice as long.

    References:
        Sander, Ablin, Blondel and Peyré, Momentum Residual Neural Networks, arXiv:2102.07870. Storing the lost bits is
        the idea of Maclaurin, Duvenaud and Adams, arXiv:1502.03492. The authors' code stores x in float32, so that it
        reverses its layers only approximately.

    Arguments:
        layers: a list of modules :math:`f_n`, one per layer, or one module for all layers together with ``depth``. Each
            maps the shape of x to itself.
        depth: number of layers if ``layers`` is one module. Default: None.
        momentum: γ in [0, 1]; it is rounded to a multiple of :math:`2^{-30}`. γ = 0 is a residual network, which only
            ``gradient="direct"`` can train. Default: ``0.9``.
        initial_velocity: module or callable x -> v_0 of the shape of x; None gives zeros. Default: None.
        gradient: ``"reversible"``, or ``"direct"`` to store all layers' activations. Second derivatives, torch.compile
            and the transforms of torch.func use ``"direct"`` by themselves, except for ``create_graph=True``, which
            raises. Default: ``"reversible"``.

    Shape:
        - x: (batch, ...) -> (batch, ...).

    Raises:
        ValueError: if an argument is out of its range, or a layer changes the shape or its buffers, as BatchNorm does
            in training mode.
        NonFiniteError: with ``gradient="reversible"``, if x or a layer's output is not finite, or exceeds 2,097,152
            (8,192 for float64 inputs); ``t`` is the number of the layer.
        ReversalError: if the backward pass does not recover the input bit by bit, because a layer's output differed in
            the second evaluation.

    Example:
        >>> import torch, hbnode
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(50)]
        >>> net = hbnode.nn.MomentumResNet(layers)
        >>> net(torch.randn(4, 8)).sum().backward()
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.ModuleList | nn.Module,
        *,
        depth: int | None = None,
        momentum: float = 0.9,
        initial_velocity: Callable[[Tensor], Tensor] | None = None,
        gradient: Literal["reversible", "direct"] = "reversible",
    ) -> None:
        super().__init__()
        is_shared = isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList)
        if not is_shared and not isinstance(layers, (Sequence, nn.ModuleList)):
            kind = type(layers).__name__
            raise TypeError(f"layers must be modules, got {kind}. Fix: MomentumResNet([torch.nn.Linear(8, 8)]).")
        if is_shared != (depth is not None):
            raise ValueError(
                f"expected a list of modules, or one module and depth=, got {type(layers).__name__} and depth={depth}. "
                "Fix: MomentumResNet([f, g, h]), or MomentumResNet(f, depth=3)."
            )
        modules: list[Any] = [layers] if is_shared else list(layers)  # type: ignore[arg-type]  # a list of modules
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            kinds = ", ".join(type(module).__name__ for module in modules) or "nothing"
            raise TypeError(f"layers must be modules, got {kinds}. Fix: MomentumResNet([torch.nn.Linear(8, 8)]).")
        momentum = as_real(momentum, "momentum", "use the paper's 0.9")
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {momentum}. Fix: use the paper's 0.9.")
        self.numerator = round(momentum * 2**SHIFT)
        self.layers = nn.ModuleList(modules)
        self.depth = len(modules) if depth is None else as_count(depth, "depth")
        if initial_velocity is not None:
            check_callable(initial_velocity, "initial_velocity", "initial_velocity=torch.nn.Linear(8, 8), or None")
        self.initial_velocity = initial_velocity
        self.gradient = gradient

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gradient":
            if not is_one_of(value, ("reversible", "direct")):
                raise ValueError(f"gradient must be 'reversible' or 'direct', got {value!r}. Fix: leave it out.")
            if not self.numerator and value == "reversible":
                raise ValueError(
                    f"gradient='reversible' needs momentum > 0, got {self.momentum}. Fix: gradient='direct'."
                )
        super().__setattr__(name, value)

    @property
    def momentum(self) -> float:
        """The momentum γ, a multiple of 2^-30."""
        return self.numerator / 2**SHIFT

    def forward(self, x: Tensor) -> Tensor:
        """Return x after all layers, (batch, ...)."""
        x, v = with_momentum(x, self.initial_velocity, "initial_velocity")
        if not x.is_floating_point():
            raise TypeError(f"x must be a tensor of floating point numbers, got {x.dtype}. Fix: x.float().")
        leaves: list[Tensor] = [p for p in self.layers.parameters() if p.requires_grad]
        if self.gradient == "direct" or needs_reference() or not (leaves or x.requires_grad or v.requires_grad):
            for layer in self.stack():
                v = self.momentum * v + (1 - self.momentum) * self.evaluate(layer, x).to(x.dtype)
                x = x + v
            return x
        if any(leaf._backward_hooks for leaf in leaves):
            raise ValueError(
                "a parameter has a hook of register_hook, which gradient='reversible' would run on each partial "
                "gradient and on their sum. Fix: register_post_accumulate_grad_hook, or gradient='direct'."
            )
        return _reversible(_Record(self, x, leaves), x, v, *leaves)[0]

    def stack(self) -> list[nn.Module]:
        """Return the modules of all layers in order; a shared module is repeated."""
        return [*self.layers] * (self.depth // len(self.layers))

    def evaluate(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the value of a layer; raise ValueError if it does not have the shape of ``x``."""
        f = layer(x)
        if not isinstance(f, Tensor) or f.shape != x.shape:
            what = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(
                f"a layer returned {what}; expected the shape of x, {tuple(x.shape)}. "
                "Fix: make its output size equal to its input size."
            )
        return f

    def extra_repr(self) -> str:
        return f"depth={self.depth}, momentum={self.momentum:.4g}, gradient={self.gradient!r}"


class _Record:
    """Settings of a forward pass for the backward pass: autocast, random states, and how numbers become integers."""

    def __init__(self, net: MomentumResNet, x: Tensor, leaves: list[Tensor]) -> None:
        self.net, self.leaves, self.dtype, self.device = net, leaves, x.dtype, x.device
        self.known = frozenset(map(id, leaves))
        self.scale = 2.0**48 if x.dtype == torch.float64 else 2.0**40
        self.states: list[tuple[Tensor, ...] | None] = []  # of the random number generators before a layer
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if is_autocast(x) else None
        self.autocast = no_autocast(x) if dtype is None else torch.autocast(kind, dtype, cache_enabled=False)

    def to_integers(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return (x.detach().double() * (factor * self.scale)).round_().long()

    def to_numbers(self, integers: Tensor) -> Tensor:
        return (integers.double() / self.scale).to(self.dtype)

    def evaluate(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return a layer's value under the autocast of the forward pass; refuse tensors that would get no gradient."""
        with self.autocast:
            if not torch.is_grad_enabled():
                return self.net.evaluate(layer, x)
            return evaluate_known(lambda: self.net.evaluate(layer, x.clone()), (x,), self.known)


def _refuse_higher(record: _Record, *tensors: Tensor) -> tuple[Tensor, ...]:
    raise RuntimeError(
        "gradient='reversible' gives first derivatives only, got create_graph=True. Fix: gradient='direct'."
    )


def _undo(record: _Record, tensors: Any, residuals: Any, grads: Any, needed: Any) -> tuple[Any, ...]:
    """Reverse the layers from the last to the first, and return the gradients of x, v and the leaves."""
    net, (x, v, *words) = record.net, residuals
    gamma, lost = net.momentum, _Digits(net.numerator, [*words], net.depth)
    of_x, of_v = grads[0], torch.zeros_like(grads[0])
    sums: dict[int, Tensor] = {}
    for layer, states in zip(reversed(net.stack()), reversed(record.states), strict=True):
        x = x - v
        start = record.to_numbers(x).requires_grad_()
        with torch.enable_grad(), set_random_state(states, record.device):
            f = record.evaluate(layer, start)
        v = lost.restore(v - record.to_integers(f, 1 - gamma))
        of_v = of_v + of_x
        leaves = [p for p in layer.parameters() if p.requires_grad]
        of_start, *found = vjp((f,), [start, *leaves], (((1 - gamma) * of_v).to(f.dtype),))
        of_x, of_v = of_x if of_start is None else of_x + of_start, gamma * of_v
        for leaf, g in zip(leaves, found, strict=True):
            if g is not None:
                sums[id(leaf)] = sums[id(leaf)] + g if id(leaf) in sums else g
    if not (torch.equal(x, record.to_integers(tensors[0])) and torch.equal(v, record.to_integers(tensors[1]))):
        raise ReversalError(
            "the reversed layers do not recover the input: a layer's second evaluation gave another value. Expected "
            "the same parameters, modes and deterministic operations in both passes. Fix: gradient='direct', or call "
            "backward() before changing the layers",
            t=0.0,
            step_size=1.0,
            nfe=2 * net.depth,
        )
    return of_x, of_v, *(sums.get(id(leaf)) for leaf in record.leaves)


@fast_form(reference=_refuse_higher, vjp=_undo)
def _reversible(record: _Record, needs_grad: bool, x: Tensor, v: Tensor, *leaves: Tensor) -> tuple[Any, Any]:
    """Return x after all layers, and the integers from which the layers can be reversed."""
    keep_freed_memory(record.device)
    net, x, v = record.net, record.to_integers(x), record.to_integers(v)
    gamma, limit, lost, fits = net.momentum, LIMIT / record.scale, _Digits(net.numerator, []), []
    versions = _versions(net)
    for layer in net.stack():
        start, before = record.to_numbers(x), random_state(record.device)
        with torch.set_grad_enabled(needs_grad):  # the same operations as in the backward pass
            f = record.evaluate(layer, start.requires_grad_(needs_grad)).detach()
        drew = not all(map(torch.equal, before, random_state(record.device)))
        record.states.append(before if drew else None)
        v = lost.shrink(v) + record.to_integers(f, 1 - gamma)
        x = x + v
        fits.append(((start.detach().abs() < limit) & (f.abs() < limit)).all())
    if needs_grad and versions != _versions(net):
        raise ValueError(
            "gradient='reversible' needs layers with constant buffers, but a layer changes its buffers (BatchNorm or "
            "spectral_norm in training mode?). Fix: put that layer in eval mode, use GroupNorm, or "
            "gradient='direct'."
        )
    fits.append((record.to_numbers(x).abs() < limit).all())
    if record.device.type != "meta" and not all(within := torch.stack(fits).tolist()):  # one wait for a GPU
        raise NonFiniteError(
            f"x or a layer's output is not finite or exceeds {limit:g}, the largest number that gradient='reversible' "
            "can represent. Fix: check the learning rate, or gradient='direct'",
            t=float(within.index(False)),
            step_size=1.0,
            nfe=net.depth,
        )
    return (record.to_numbers(x),), (x, v, *lost.words)


def _versions(net: MomentumResNet) -> list[int]:
    return [buffer._version for buffer in net.layers.buffers() if not buffer.is_inference()]


class _Digits:
    """The digits that are lost when integers v are multiplied by γ = n/2^30 and rounded down, packed into int64 words.

    At most ceil(1/γ) values of v have the same floor(γv). The lost digit is the place of v among these values.
    """

    def __init__(self, n: int, words: list[Tensor], count: int = 0) -> None:
        self.n, self.words, self.count = n, words, count
        self.bits = (-(-(1 << SHIFT) // n) - 1).bit_length()  # of a digit
        self.per_word = 63 // max(1, self.bits)

    def shrink(self, v: Tensor) -> Tensor:
        """Return floor(γv), and keep the lost digits."""
        product = (v & MASK) * self.n
        digit = (product & MASK).div(self.n, rounding_mode="floor")
        if self.count % self.per_word == 0:
            self.words.append(torch.zeros_like(v))
        self.words[-1] = (self.words[-1] << self.bits) | digit
        self.count += 1
        return (v >> SHIFT) * self.n + (product >> SHIFT)

    def restore(self, shrunk: Tensor) -> Tensor:
        """Return v from floor(γv) and the digits that were lost last."""
        self.count -= 1
        word = self.words[self.count // self.per_word]
        self.words[self.count // self.per_word] = word >> self.bits
        quotient = shrunk.neg().div(self.n, rounding_mode="floor")
        rest = ((-shrunk - quotient * self.n) << SHIFT).div(self.n, rounding_mode="floor")
        least = -((quotient << SHIFT) + rest)  # the least v that becomes this: ceil(shrunk / γ)
        return least + (word & ((1 << self.bits) - 1))
