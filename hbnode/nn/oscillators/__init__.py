"""Layers of damped oscillators with exact gaps."""

from hbnode.nn.oscillators.cell import OscillatorCell
from hbnode.nn.oscillators.closed_form import OscillatorStep, held_response, oscillator_step
from hbnode.nn.oscillators.kalman import Gaussian, OscillatorBelief, OscillatorFiltered
from hbnode.nn.oscillators.layer import Oscillators
from hbnode.nn.oscillators.rates import oscillator_ranges
from hbnode.nn.oscillators.stack import OscillatorStack, OscillatorStackState
from hbnode.nn.oscillators.state import OscillatorState

__all__ = [
    "Gaussian",
    "OscillatorBelief",
    "OscillatorCell",
    "OscillatorFiltered",
    "OscillatorStack",
    "OscillatorStackState",
    "OscillatorState",
    "OscillatorStep",
    "Oscillators",
    "held_response",
    "oscillator_ranges",
    "oscillator_step",
]
