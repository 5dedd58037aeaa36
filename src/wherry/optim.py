"""For installs made before wherry.optim was a package, which look for this file; to be deleted with the next install."""

from pathlib import Path

__path__ = [str(Path(__file__).with_suffix(""))]

from wherry.optim.cpu import CPUAdagrad, CPUAdam, CPULion
from wherry.optim.lamb import Lamb
from wherry.optim.muon import Muon, hidden_matrices

__all__ = ["CPUAdagrad", "CPUAdam", "CPULion", "Lamb", "Muon", "hidden_matrices"]
