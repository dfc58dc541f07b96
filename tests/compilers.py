"""Whether torch.compile can work here."""

import os
import shutil

import pytest

COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, which torch.compile needs")
