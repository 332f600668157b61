"""Hessian-free optimization of recurrent nets."""

from hbnode.optim.evaluation import tanh_hidden
from hbnode.optim.hessian_free import HessianFree
from hbnode.optim.progress import Progress

__all__ = ["HessianFree", "Progress", "tanh_hidden"]
