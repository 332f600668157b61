"""Recurrent layers and cells with momentum, which any rule of :mod:`hbnode.nn.rules` can take the place of."""

from hbnode.nn.recurrent.cells import MomentumGRUCell, MomentumLSTMCell, MomentumRNNCell
from hbnode.nn.recurrent.layers import MomentumGRU, MomentumLSTM, MomentumRNN
from hbnode.nn.recurrent.orthogonal import (
    DTRIV,
    DTRIVCell,
    MomentumDTRIV,
    MomentumDTRIVCell,
    parameter_groups,
    rebase_every,
)
from hbnode.nn.recurrent.state import RecurrentState
from hbnode.nn.recurrent.tanh import TanhRNN, sparse_

__all__ = [
    "MomentumRNN",
    "MomentumLSTM",
    "MomentumGRU",
    "MomentumDTRIV",
    "MomentumRNNCell",
    "MomentumLSTMCell",
    "MomentumGRUCell",
    "MomentumDTRIVCell",
    "RecurrentState",
    # orthogonal weights
    "DTRIV",
    "DTRIVCell",
    "parameter_groups",
    "rebase_every",
    # a plain network for Hessian-free optimization
    "TanhRNN",
    "sparse_",
]
