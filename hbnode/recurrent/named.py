"""The layers and cells under the names of the papers: each is a cell with a rule, and has the arguments of both.

By position a layer's arguments are those of torch.nn's layer; a cell's are its sizes, the rule's coefficients, bias.
"""

from __future__ import annotations

from hbnode.recurrent import rules
from hbnode.recurrent.cells import GRUCell, LSTMCell, RNNCell
from hbnode.recurrent.layers import GRU, LSTM, RNN
from hbnode.recurrent.orthogonal import DTRIV, DTRIVCell


class _Momentum:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *others: float,
        momentum: float = 0.6,
        step_size: float = 0.6,
        **options: object,
    ) -> None:
        rule = rules.Momentum(momentum=momentum, step_size=step_size)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class _MomentumCell:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float = 0.6,
        step_size: float = 0.6,
        *others: float,
        **options: object,
    ) -> None:
        rule = rules.Momentum(momentum=momentum, step_size=step_size)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class MomentumRNN(_Momentum, RNN):
    """:class:`RNN` with heavy-ball momentum; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumRNNCell(_MomentumCell, RNNCell):
    """One step of :class:`MomentumRNN`; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumLSTM(_Momentum, LSTM):
    """:class:`LSTM` with heavy-ball momentum; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumLSTMCell(_MomentumCell, LSTMCell):
    """One step of :class:`MomentumLSTM`; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumGRU(_Momentum, GRU):
    """:class:`GRU` with heavy-ball momentum; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumGRUCell(_MomentumCell, GRUCell):
    """One step of :class:`MomentumGRU`; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumDTRIV(_Momentum, DTRIV):
    """:class:`DTRIV` with heavy-ball momentum; see :class:`hbnode.recurrent.rules.Momentum`."""


class MomentumDTRIVCell(_MomentumCell, DTRIVCell):
    """One step of :class:`MomentumDTRIV`; see :class:`hbnode.recurrent.rules.Momentum`."""


class _NAG:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *others: float,
        step_size: float = 0.6,
        **options: object,
    ) -> None:
        rule = rules.NAG(step_size=step_size)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class _NAGCell:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        *others: float,
        **options: object,
    ) -> None:
        rule = rules.NAG(step_size=step_size)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class NAGRNN(_NAG, RNN):
    """:class:`RNN` with Nesterov's momentum; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGRNNCell(_NAGCell, RNNCell):
    """One step of :class:`NAGRNN`; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGLSTM(_NAG, LSTM):
    """:class:`LSTM` with Nesterov's momentum; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGLSTMCell(_NAGCell, LSTMCell):
    """One step of :class:`NAGLSTM`; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGGRU(_NAG, GRU):
    """:class:`GRU` with Nesterov's momentum; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGGRUCell(_NAGCell, GRUCell):
    """One step of :class:`NAGGRU`; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGDTRIV(_NAG, DTRIV):
    """:class:`DTRIV` with Nesterov's momentum; see :class:`hbnode.recurrent.rules.NAG`."""


class NAGDTRIVCell(_NAGCell, DTRIVCell):
    """One step of :class:`NAGDTRIV`; see :class:`hbnode.recurrent.rules.NAG`."""


class _SR:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *others: float,
        restart: int = 40,
        step_size: float = 0.6,
        **options: object,
    ) -> None:
        rule = rules.ScheduledRestart(restart=restart, step_size=step_size)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class _SRCell:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        restart: int = 40,
        step_size: float = 0.6,
        *others: float,
        **options: object,
    ) -> None:
        rule = rules.ScheduledRestart(restart=restart, step_size=step_size)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class SRRNN(_SR, RNN):
    """:class:`RNN` with scheduled restart; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRRNNCell(_SRCell, RNNCell):
    """One step of :class:`SRRNN`; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRLSTM(_SR, LSTM):
    """:class:`LSTM` with scheduled restart; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRLSTMCell(_SRCell, LSTMCell):
    """One step of :class:`SRLSTM`; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRGRU(_SR, GRU):
    """:class:`GRU` with scheduled restart; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRGRUCell(_SRCell, GRUCell):
    """One step of :class:`SRGRU`; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRDTRIV(_SR, DTRIV):
    """:class:`DTRIV` with scheduled restart; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class SRDTRIVCell(_SRCell, DTRIVCell):
    """One step of :class:`SRDTRIV`; see :class:`hbnode.recurrent.rules.ScheduledRestart`."""


class _Adam:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *others: float,
        momentum: float = 0.6,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        **options: object,
    ) -> None:
        rule = rules.Adam(momentum=momentum, step_size=step_size, beta=beta, eps=eps)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class _AdamCell:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float = 0.6,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        *others: float,
        **options: object,
    ) -> None:
        rule = rules.Adam(momentum=momentum, step_size=step_size, beta=beta, eps=eps)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class AdamRNN(_Adam, RNN):
    """:class:`RNN` with Adam; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamRNNCell(_AdamCell, RNNCell):
    """One step of :class:`AdamRNN`; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamLSTM(_Adam, LSTM):
    """:class:`LSTM` with Adam; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamLSTMCell(_AdamCell, LSTMCell):
    """One step of :class:`AdamLSTM`; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamGRU(_Adam, GRU):
    """:class:`GRU` with Adam; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamGRUCell(_AdamCell, GRUCell):
    """One step of :class:`AdamGRU`; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamDTRIV(_Adam, DTRIV):
    """:class:`DTRIV` with Adam; see :class:`hbnode.recurrent.rules.Adam`."""


class AdamDTRIVCell(_AdamCell, DTRIVCell):
    """One step of :class:`AdamDTRIV`; see :class:`hbnode.recurrent.rules.Adam`."""


class _RMSProp:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *others: float,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        **options: object,
    ) -> None:
        rule = rules.RMSProp(step_size=step_size, beta=beta, eps=eps)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class _RMSPropCell:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        beta: float = 0.9,
        eps: float = 1e-8,
        *others: float,
        **options: object,
    ) -> None:
        rule = rules.RMSProp(step_size=step_size, beta=beta, eps=eps)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class RMSPropRNN(_RMSProp, RNN):
    """:class:`RNN` with RMSProp; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropRNNCell(_RMSPropCell, RNNCell):
    """One step of :class:`RMSPropRNN`; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropLSTM(_RMSProp, LSTM):
    """:class:`LSTM` with RMSProp; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropLSTMCell(_RMSPropCell, LSTMCell):
    """One step of :class:`RMSPropLSTM`; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropGRU(_RMSProp, GRU):
    """:class:`GRU` with RMSProp; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropGRUCell(_RMSPropCell, GRUCell):
    """One step of :class:`RMSPropGRU`; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropDTRIV(_RMSProp, DTRIV):
    """:class:`DTRIV` with RMSProp; see :class:`hbnode.recurrent.rules.RMSProp`."""


class RMSPropDTRIVCell(_RMSPropCell, DTRIVCell):
    """One step of :class:`RMSPropDTRIV`; see :class:`hbnode.recurrent.rules.RMSProp`."""


class _AdaptiveMomentum:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *others: float,
        step_size: float = 0.6,
        delta: float = 1e-3,
        **options: object,
    ) -> None:
        rule = rules.AdaptiveMomentum(step_size=step_size, delta=delta)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class _AdaptiveMomentumCell:
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        step_size: float = 0.6,
        delta: float = 1e-3,
        *others: float,
        **options: object,
    ) -> None:
        rule = rules.AdaptiveMomentum(step_size=step_size, delta=delta)
        super().__init__(input_size, hidden_size, *others, rule=rule, **options)


class AdaptiveMomentumRNN(_AdaptiveMomentum, RNN):
    """:class:`RNN` with momentum that the inputs set; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumRNNCell(_AdaptiveMomentumCell, RNNCell):
    """One step of :class:`AdaptiveMomentumRNN`; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumLSTM(_AdaptiveMomentum, LSTM):
    """:class:`LSTM` with momentum that the inputs set; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumLSTMCell(_AdaptiveMomentumCell, LSTMCell):
    """One step of :class:`AdaptiveMomentumLSTM`; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumGRU(_AdaptiveMomentum, GRU):
    """:class:`GRU` with momentum that the inputs set; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumGRUCell(_AdaptiveMomentumCell, GRUCell):
    """One step of :class:`AdaptiveMomentumGRU`; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumDTRIV(_AdaptiveMomentum, DTRIV):
    """:class:`DTRIV` with momentum that the inputs set; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""


class AdaptiveMomentumDTRIVCell(_AdaptiveMomentumCell, DTRIVCell):
    """One step of :class:`AdaptiveMomentumDTRIV`; see :class:`hbnode.recurrent.rules.AdaptiveMomentum`."""
