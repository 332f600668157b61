"""Gradients that evaluate the field again in the backward pass: checkpoint, reversible, adjoint."""
