"""Solving ODEs: one loop for every method, step control and gradient."""

from hbnode.solve.odeint import odeint

__all__ = ["odeint"]
