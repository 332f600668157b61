"""Recurrent layers and cells with momentum, which any rule of :mod:`hbnode.recurrent.rules` can take the place of."""

from hbnode.recurrent import rules
from hbnode.recurrent.cells import MomentumGRUCell, MomentumLSTMCell, MomentumRNNCell
from hbnode.recurrent.layers import MomentumGRU, MomentumLSTM, MomentumRNN
from hbnode.recurrent.orthogonal import (
    DTRIV,
    DTRIVCell,
    MomentumDTRIV,
    MomentumDTRIVCell,
    parameter_groups,
    rebase_every,
)
from hbnode.recurrent.state import RecurrentState
from hbnode.recurrent.tanh import TanhRNN, sparse_

__all__ = [
    "rules",
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
