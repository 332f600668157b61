"""Annealed heavy-ball Langevin dynamics: samples, log weights and normalising constants of unnormalised densities."""

from hbnode.distributions.annealing.sampler import HeavyBallAnnealing, LogZ

__all__ = ["HeavyBallAnnealing", "LogZ"]
