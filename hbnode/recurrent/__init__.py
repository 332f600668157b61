"""Recurrent layers and cells with momentum.

The names of the papers, such as :class:`MomentumLSTM`, are importable from here and from :mod:`hbnode`. :class:`RNN`,
:class:`LSTM`, :class:`GRU` and :class:`DTRIV` take any rule of :mod:`hbnode.recurrent.rules`, as do their cells.
"""

from hbnode.recurrent import rules
from hbnode.recurrent.cells import GRUCell, LSTMCell, RNNCell
from hbnode.recurrent.layers import GRU, LSTM, RNN
from hbnode.recurrent.named.adam import AdamDTRIV, AdamGRU, AdamLSTM, AdamRNN
from hbnode.recurrent.named.adam_cells import AdamDTRIVCell, AdamGRUCell, AdamLSTMCell, AdamRNNCell
from hbnode.recurrent.named.adaptive_momentum import (
    AdaptiveMomentumDTRIV,
    AdaptiveMomentumGRU,
    AdaptiveMomentumLSTM,
    AdaptiveMomentumRNN,
)
from hbnode.recurrent.named.adaptive_momentum_cells import (
    AdaptiveMomentumDTRIVCell,
    AdaptiveMomentumGRUCell,
    AdaptiveMomentumLSTMCell,
    AdaptiveMomentumRNNCell,
)
from hbnode.recurrent.named.momentum import MomentumDTRIV, MomentumGRU, MomentumLSTM, MomentumRNN
from hbnode.recurrent.named.momentum_cells import MomentumDTRIVCell, MomentumGRUCell, MomentumLSTMCell, MomentumRNNCell
from hbnode.recurrent.named.nag import NAGDTRIV, NAGGRU, NAGLSTM, NAGRNN
from hbnode.recurrent.named.nag_cells import NAGDTRIVCell, NAGGRUCell, NAGLSTMCell, NAGRNNCell
from hbnode.recurrent.named.rmsprop import RMSPropDTRIV, RMSPropGRU, RMSPropLSTM, RMSPropRNN
from hbnode.recurrent.named.rmsprop_cells import RMSPropDTRIVCell, RMSPropGRUCell, RMSPropLSTMCell, RMSPropRNNCell
from hbnode.recurrent.named.scheduled_restart import SRDTRIV, SRGRU, SRLSTM, SRRNN
from hbnode.recurrent.named.scheduled_restart_cells import SRDTRIVCell, SRGRUCell, SRLSTMCell, SRRNNCell
from hbnode.recurrent.orthogonal import DTRIV, DTRIVCell, parameter_groups, rebase_every
from hbnode.recurrent.state import RecurrentState
from hbnode.recurrent.tanh import TanhRNN, sparse_

__all__ = [
    "rules",
    "RecurrentState",
    # with any rule
    "RNN",
    "LSTM",
    "GRU",
    "DTRIV",
    "RNNCell",
    "LSTMCell",
    "GRUCell",
    "DTRIVCell",
    # orthogonal weights
    "parameter_groups",
    "rebase_every",
    # a plain network for Hessian-free optimization
    "TanhRNN",
    "sparse_",
    # heavy-ball momentum
    "MomentumRNN",
    "MomentumRNNCell",
    "MomentumLSTM",
    "MomentumLSTMCell",
    "MomentumGRU",
    "MomentumGRUCell",
    "MomentumDTRIV",
    "MomentumDTRIVCell",
    # Nesterov's momentum
    "NAGRNN",
    "NAGRNNCell",
    "NAGLSTM",
    "NAGLSTMCell",
    "NAGGRU",
    "NAGGRUCell",
    "NAGDTRIV",
    "NAGDTRIVCell",
    # scheduled restart
    "SRRNN",
    "SRRNNCell",
    "SRLSTM",
    "SRLSTMCell",
    "SRGRU",
    "SRGRUCell",
    "SRDTRIV",
    "SRDTRIVCell",
    # Adam
    "AdamRNN",
    "AdamRNNCell",
    "AdamLSTM",
    "AdamLSTMCell",
    "AdamGRU",
    "AdamGRUCell",
    "AdamDTRIV",
    "AdamDTRIVCell",
    # RMSProp
    "RMSPropRNN",
    "RMSPropRNNCell",
    "RMSPropLSTM",
    "RMSPropLSTMCell",
    "RMSPropGRU",
    "RMSPropGRUCell",
    "RMSPropDTRIV",
    "RMSPropDTRIVCell",
    # momentum that the inputs set
    "AdaptiveMomentumRNN",
    "AdaptiveMomentumRNNCell",
    "AdaptiveMomentumLSTM",
    "AdaptiveMomentumLSTMCell",
    "AdaptiveMomentumGRU",
    "AdaptiveMomentumGRUCell",
    "AdaptiveMomentumDTRIV",
    "AdaptiveMomentumDTRIVCell",
]
