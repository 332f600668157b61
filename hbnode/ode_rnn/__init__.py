"""ODE-RNNs for irregular series."""

from hbnode.ode_rnn.layer import ODERNN
from hbnode.ode_rnn.state import Filtered, ODERNNState

__all__ = ["ODERNN", "ODERNNState", "Filtered"]
