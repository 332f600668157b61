"""A plain tanh network whose initial state is learned, with the sparse initial weights of Hessian-free optimization."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from hbnode._checks import as_count, check_bool, check_input
from hbnode._torch import fused_layer, is_autocast, no_autocast
from hbnode.nn.recurrent.batch import SequenceBatch


class TanhRNN(nn.Module):
    """A tanh network with a learned start.

    With x_i the inputs::

        t_1 = W_hx x_1 + b + b_init
        t_i = W_hx x_i + b + W_hh h_{i-1},  i > 1
        h_i = tanh(t_i)

    It is called as :class:`torch.nn.RNN` is. :class:`~hbnode.optim.HessianFree` has fast products for it, as for any
    ``torch.nn.RNN``. The outputs are the states; a ``torch.nn.Linear`` reads them where it is wanted.

    References: Martens and Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization (ICML 2011),
    supplement, Algorithm 1 and section 2.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        connections: how many initial weights are not zero: of each unit in W_hh, of each input in W_hx. Default:
            ``15``.
        input_std: standard deviation of the initial weights of W_hx that are not zero. Default: ``1.0``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        h0: (1, batch, hidden_size), or (1, hidden_size) of one sequence.
        output: h at every sample, (T, batch, hidden_size).
        h: the last h of each sequence, in the form of h0.

    Raises:
        ValueError: a size is not valid.

    Example:
        >>> output, h = TanhRNN(3, 5)(torch.ones(7, 2, 3))
        >>> output.shape, h.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        batch_first: bool = False,
        *,
        connections: int = 15,
        input_std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.batch_first = check_bool(
            batch_first, "batch_first", "pass it by name; there is one layer, in one direction"
        )
        self.connections, self.input_std = as_count(connections, "connections"), input_std
        sizes = {
            "weight_ih": (self.hidden_size, self.input_size),
            "weight_hh": (self.hidden_size, self.hidden_size),
            "bias": (self.hidden_size,),
            "bias_init": (self.hidden_size,),
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    if TYPE_CHECKING:
        weight_ih: Tensor
        weight_hh: Tensor
        bias: Tensor
        bias_init: Tensor

        @overload
        def __call__(self, x: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(self, x: PackedSequence, h0: Tensor | None = None) -> tuple[PackedSequence, Tensor]: ...
        @override
        def __call__(
            self, x: Tensor | PackedSequence, h0: Tensor | None = None
        ) -> tuple[Tensor | PackedSequence, Tensor]:
            return self.forward(x, h0)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw sparse weights by :func:`sparse_`, and the biases from the distribution of the weights of W_hh.

        Each unit has ``connections`` weights in W_hh, and each input has as many in W_hx: so few units see the inputs
        that the others keep what they hold.
        """
        sparse_(self.weight_ih.T, self.connections, self.input_std)
        sparse_(self.weight_hh, self.connections)
        for bias in (self.bias, self.bias_init):
            bias.normal_(std=self.connections**-0.5)

    def forward(self, x: Tensor | PackedSequence, h0: Tensor | None = None) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run over sequences, from their start or from where an earlier chunk ended.

        Arguments:
            x: (T, batch, input_size), with ``batch_first`` (batch, T, input_size), or one sequence (T, input_size),
                or a PackedSequence.
            h0: the last h of an earlier call; None is the start of a sequence, where b_init stands for W_hh h_0.
                Default: ``None``.

        Returns:
            h at every sample, in the form of x, and the last h of each sequence (1, batch, hidden_size).

        Raises:
            TypeError: x is not floating point.
            ValueError: x or h0 has another shape than expected.
        """
        batch = SequenceBatch.read(x, self.input_size, self.batch_first)
        inputs, weight = batch.x, self.weight_ih
        if is_autocast(inputs):
            inputs = inputs.to(weight.dtype)
        elif inputs.dtype != weight.dtype:
            raise ValueError(
                f"x must be {weight.dtype} as the parameters are, got {inputs.dtype}. Fix: x.to({weight.dtype})."
            )
        with no_autocast(inputs):
            out, last = self._run(batch, inputs, h0)
        return batch.output(out), batch.unsort(last, axis=1)

    def _run(self, batch: SequenceBatch, inputs: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """All h (T, batch, hidden_size), and the last in the order of the batch."""
        weight, shape = self.weight_ih, (1, inputs.shape[1], self.hidden_size)
        if h0 is None:  # b_init is the weight of an input that is 1 at the start and 0 later
            start = inputs.new_zeros(*inputs.shape[:2], 1)
            start[0] = 1
            inputs, weight = torch.cat([inputs, start], -1), torch.cat([weight, self.bias_init.unsqueeze(1)], 1)
            before = inputs.new_zeros(shape)
        else:
            wanted = (1, self.hidden_size) if batch.is_single else shape
            check_input(h0, "h0")
            if tuple(h0.shape) != wanted:
                raise ValueError(
                    f"h0 must be {wanted}, got {tuple(h0.shape)}. Fix: the h that the call before returned."
                )
            before = batch.sort(h0.to(weight.dtype), axis=1)
        weights = [weight, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
        if batch.sizes is None:
            out, last = fused_layer("rnn_tanh", inputs, before, weights)
        else:
            out, last = fused_layer("rnn_tanh", batch.select(inputs), before, weights, batch.sizes)
            out = batch.pad(out)
        return out, last

    def extra_repr(self) -> str:
        """Sizes, and whether the batch comes first."""
        return f"{self.input_size}, {self.hidden_size}" + (", batch_first=True" if self.batch_first else "")


@torch.no_grad()
def sparse_(weight: Tensor, connections: int = 15, std: float | None = None) -> Tensor:
    """Draw a sparse weight in place: each unit, a row, has a number of weights from N(0, std^2) and zeros otherwise.

    References: Martens, Deep learning via Hessian-free optimization (ICML 2010), section 5; variances as in section 2
    of the supplement to Martens and Sutskever (ICML 2011): 1 / connections for W_hh and for the readout, 1 for W_hx.

    Arguments:
        weight: (units, inputs).
        connections: how many weights of a unit are not zero; all, if there are fewer inputs. Default: ``15``.
        std: standard deviation. Default: ``None``, 1 / sqrt(connections).

    Returns:
        The weight.

    Raises:
        ValueError: the weight is not a matrix, or connections is not a positive whole number.

    Example:
        >>> (sparse_(torch.empty(4, 100)) != 0).sum(1)
        tensor([15, 15, 15, 15])
    """
    count = as_count(connections, "connections")
    if weight.dim() != 2:
        raise ValueError(f"weight must be (units, inputs), got {tuple(weight.shape)}. Fix: weight.flatten(1).")
    if std is not None and not (isinstance(std, (int, float)) and 0 <= std < math.inf):
        raise ValueError(f"std must be a number >= 0, got {std!r}. Fix: std=1.0.")
    drawn = torch.randn_like(weight) * (count**-0.5 if std is None else std)
    order = torch.rand_like(weight, dtype=torch.float32).argsort(1)
    return weight.copy_(drawn.masked_fill_(order >= count, 0))
