"""A Hessian-free optimizer for recurrent networks, and the weights of hidden states for its structural damping."""

from hbnode.optim.curvature import tanh_hidden
from hbnode.optim.hessian_free import HessianFree, Progress

__all__ = ["HessianFree", "Progress", "tanh_hidden"]
