"""ODE-RNNs for irregular series."""

from hbnode.ode_rnn.layer import ODERNN, Filtered, ODERNNState

__all__ = ["ODERNN", "ODERNNState", "Filtered"]
