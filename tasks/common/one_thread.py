"""Imported first where runs are forked from: OpenMP's threads do not survive a fork, so that process has one."""

import torch

torch.set_num_threads(1)  # a run sets its own
