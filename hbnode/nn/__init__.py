"""The layers: ODE blocks, ODE-RNNs, recurrent layers, attention and memory with momentum, oscillators, networks."""

from hbnode._checks import add_hints
from hbnode.nn import functional, rules
from hbnode.nn.attention import HeavyBallMemory, MomentumAttention, SoftmaxAttention
from hbnode.nn.blocks import HeavyBallODEBlock, ODEBlock
from hbnode.nn.latent import ELBO, LatentODE, LatentPrediction, LatentSDE
from hbnode.nn.nets import MLP, ConvNet, Standardize, match_parameters
from hbnode.nn.ode_rnn import ODERNN, Filtered, ODERNNState
from hbnode.nn.oscillators import (
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
)
from hbnode.nn.recurrent import (
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
from hbnode.nn.selective import SelectiveOscillators as _SelectiveOscillators  # noqa: F401  # Oscillators makes it
from hbnode.nn.transformer import MomentumTransformer, MomentumTransformerDecoderLayer, MomentumTransformerLayer
from hbnode.solve.term import SolveDropout

# these two names are functions of the package, not the modules that define the functions
heavy_ball_memory, momentum_attention = functional.heavy_ball_memory, functional.momentum_attention

__all__ = [
    # ODEs
    "ODEBlock",
    "HeavyBallODEBlock",
    "ODERNN",
    "ODERNNState",
    "Filtered",
    # latent ODEs and SDEs
    "LatentODE",
    "LatentSDE",
    "LatentPrediction",
    "ELBO",
    # recurrent layers with momentum, and cells of these layers
    "MomentumRNN",
    "MomentumLSTM",
    "MomentumGRU",
    "MomentumDTRIV",
    "DTRIV",
    "TanhRNN",
    "MomentumRNNCell",
    "MomentumLSTMCell",
    "MomentumGRUCell",
    "MomentumDTRIVCell",
    "DTRIVCell",
    "RecurrentState",
    "rules",
    # oscillators
    "Oscillators",
    "OscillatorStack",
    "OscillatorCell",
    "OscillatorState",
    "OscillatorStackState",
    "OscillatorBelief",
    "OscillatorFiltered",
    "OscillatorStep",
    "Gaussian",
    "oscillator_ranges",
    # attention and memory with momentum
    "MomentumAttention",
    "HeavyBallMemory",
    "SoftmaxAttention",
    "MomentumTransformer",
    "MomentumTransformerLayer",
    "MomentumTransformerDecoderLayer",
    # networks
    "MLP",
    "ConvNet",
    "Standardize",
    "SolveDropout",
    "match_parameters",
    "functional",
]

add_hints(globals())
