"""Gaps of known networks: steps and gradients without autograd's bookkeeping."""
