"""Neural ODEs with momentum, on PyTorch."""

from hbnode import data, nets, optim, plot, recurrent, transformer
from hbnode._methods import MethodInfo, SDEMethodInfo, methods, sde_methods
from hbnode.analysis import AdjointNorms, NFEToleranceCurve, Spectrum, adjoint_norms, nfe_vs_tolerance, spectrum
from hbnode.annealing import HeavyBallAnnealing, LogZ
from hbnode.attention import (
    HeavyBallMemory,
    HeavyBallMemoryState,
    MomentumAttention,
    MomentumAttentionState,
    SoftmaxAttention,
    heavy_ball_memory,
    momentum_attention,
)
from hbnode.blocks import HeavyBallODEBlock, ODEBlock
from hbnode.errors import (
    MaxNFEError,
    MaxStepsError,
    NonFiniteError,
    RecomputationError,
    ReversalError,
    SolverError,
    StepSizeUnderflowError,
)
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE, Field, HeavyBallSDE
from hbnode.flows import HeavyBallFlow
from hbnode.nfe import NFE, StepRecord, count_nfe, record_steps
from hbnode.ode_rnn import ODERNN, Filtered, ODERNNState
from hbnode.optim import HessianFree
from hbnode.oscillators import (
    Gaussian,
    OscillatorBelief,
    OscillatorCell,
    OscillatorFiltered,
    Oscillators,
    OscillatorStack,
    OscillatorStackState,
    OscillatorState,
    OscillatorStep,
    oscillator_ranges,
    oscillator_step,
)
from hbnode.recurrent import (
    DTRIV,
    DTRIVCell,
    MomentumDTRIV,
    MomentumDTRIVCell,
    MomentumGRU,
    MomentumGRUCell,
    MomentumLSTM,
    MomentumLSTMCell,
    MomentumRNN,
    MomentumRNNCell,
    RecurrentState,
    TanhRNN,
)
from hbnode.signal import Signal
from hbnode.solve import odeint
from hbnode.solve.sde import BrownianIncrements, sdeint
from hbnode.solve.settings import Gradient, Method, Save
from hbnode.transformer import MomentumTransformer, MomentumTransformerDecoderLayer, MomentumTransformerLayer

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
    "methods",
    "MethodInfo",
    "Method",
    "Gradient",
    "Save",
    "Signal",
    "SolverError",
    "NonFiniteError",
    "StepSizeUnderflowError",
    "MaxStepsError",
    "MaxNFEError",
    "RecomputationError",
    "ReversalError",
    # noise
    "HeavyBallSDE",
    "sdeint",
    "sde_methods",
    "SDEMethodInfo",
    "BrownianIncrements",
    # blocks
    "ODEBlock",
    "HeavyBallODEBlock",
    # flows
    "HeavyBallFlow",
    # sampling
    "HeavyBallAnnealing",
    "LogZ",
    # sequences
    "ODERNN",
    "ODERNNState",
    "Filtered",
    "data",
    # oscillators
    "Oscillators",
    "OscillatorCell",
    "OscillatorStack",
    "OscillatorState",
    "OscillatorStackState",
    "OscillatorBelief",
    "OscillatorFiltered",
    "Gaussian",
    "oscillator_step",
    "OscillatorStep",
    "oscillator_ranges",
    # recurrent layers with momentum
    "recurrent",
    "RecurrentState",
    "DTRIV",
    "MomentumRNN",
    "MomentumLSTM",
    "MomentumGRU",
    "MomentumDTRIV",
    # their cells
    "DTRIVCell",
    "MomentumRNNCell",
    "MomentumLSTMCell",
    "MomentumGRUCell",
    "MomentumDTRIVCell",
    # Hessian-free optimization
    "optim",
    "HessianFree",
    "TanhRNN",
    # attention and memory with momentum
    "momentum_attention",
    "MomentumAttentionState",
    "heavy_ball_memory",
    "HeavyBallMemoryState",
    "MomentumAttention",
    "HeavyBallMemory",
    "SoftmaxAttention",
    "transformer",
    "MomentumTransformerLayer",
    "MomentumTransformerDecoderLayer",
    "MomentumTransformer",
    # counting and diagnostics
    "NFE",
    "count_nfe",
    "record_steps",
    "StepRecord",
    "nfe_vs_tolerance",
    "NFEToleranceCurve",
    "adjoint_norms",
    "AdjointNorms",
    "spectrum",
    "Spectrum",
    "plot",
]
