"""Layers of damped oscillators with exact gaps."""

from hbnode.oscillators.cell import OscillatorCell
from hbnode.oscillators.closed_form import OscillatorStep, held_response, oscillator_step
from hbnode.oscillators.kalman import Gaussian, OscillatorBelief, OscillatorFiltered
from hbnode.oscillators.layer import Oscillators
from hbnode.oscillators.rates import oscillator_ranges
from hbnode.oscillators.stack import OscillatorStack, OscillatorStackState
from hbnode.oscillators.state import OscillatorState

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
