"""Tests share the tables in ``cases.py`` and run torch on one thread, so that parallel workers do not fight."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
settings.register_profile("carryclip", deadline=None, derandomize=True)
settings.load_profile("carryclip")
