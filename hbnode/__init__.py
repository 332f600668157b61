"""Neural ODEs with momentum, on PyTorch."""

from hbnode import nets
from hbnode.analysis import NFEToleranceCurve, nfe_vs_tolerance
from hbnode.blocks import HeavyBallODEBlock, ODEBlock
from hbnode.errors import (
    MaxNFEError,
    MaxStepsError,
    NonFiniteError,
    ReversalError,
    SolverError,
    StepSizeUnderflowError,
)
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE, Field
from hbnode.nfe import NFE, count_nfe
from hbnode.ode_rnn import ODERNN, Filtered, ODERNNState
from hbnode.signal import Signal
from hbnode.solve import odeint

__version__ = "0.1.0"

__all__ = [
    # fields
    "NODE",
    "ANODE",
    "SONODE",
    "HBNODE",
    "GHBNODE",
    "Field",
    "nets",
    # solving
    "odeint",
    "Signal",
    "SolverError",
    "NonFiniteError",
    "StepSizeUnderflowError",
    "MaxStepsError",
    "MaxNFEError",
    "ReversalError",
    # blocks
    "ODEBlock",
    "HeavyBallODEBlock",
    # sequences
    "ODERNN",
    "ODERNNState",
    "Filtered",
    # counting and diagnostics
    "NFE",
    "count_nfe",
    "nfe_vs_tolerance",
    "NFEToleranceCurve",
]
