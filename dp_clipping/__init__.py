"""Differentially private training: DP-SGD (Abadi et al. 2016) at nearly the price of training.

Read in this order: engine.py (the front door), model.py and criterion.py and optimizer.py (what it
returns), passes.py and gradients.py (forward and backward, and what they leave in `.grad`),
session.py (a step), capture.py and layers/ (per-sample gradients), clip.py, noise.py,
sampling.py, loader.py, keys.py, checkpoint.py (with checkpoint_file.py, fits.py and run.py).
"""

from dp_clipping.engine import PrivacyEngine
from dp_clipping.memory_manager import BatchMemoryManager
from dp_clipping.modes import MODES

__all__ = ["MODES", "BatchMemoryManager", "PrivacyEngine"]
