"""ODE-RNNs for irregular series."""

from hbnode.nn.ode_rnn.layer import ODERNN
from hbnode.nn.ode_rnn.sequences import Filtered, ODERNNState

__all__ = ["ODERNN", "ODERNNState", "Filtered"]
