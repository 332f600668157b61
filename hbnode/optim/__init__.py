"""Hessian-free optimization of recurrent nets."""

from hbnode.optim.curvature import tanh_hidden
from hbnode.optim.hessian_free import HessianFree, Progress

__all__ = ["HessianFree", "Progress", "tanh_hidden"]
