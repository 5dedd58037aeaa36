"""Optimizers for direct use, as torch's own are: Muon and Lamb in plain torch, and those of the native kernels.

optimizer = wherry.optim.Muon.for_model(model, lr=1e-3, weight_decay=0.1)
"""

from wherry.optim.cpu import CPUAdagrad, CPUAdam, CPULion
from wherry.optim.lamb import Lamb
from wherry.optim.muon import Muon, hidden_matrices

__all__ = ["CPUAdagrad", "CPUAdam", "CPULion", "Lamb", "Muon", "hidden_matrices"]
