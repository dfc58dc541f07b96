"""Tests share the tables in ``cases.py``, run torch on one thread and give JAX four devices on the host."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Before JAX is used for the first time.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get("XLA_FLAGS", "")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the tests are run side by side already
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start
settings.register_profile("carryclip", deadline=None, derandomize=True)
settings.load_profile("carryclip")


SLOW = (
    "lab/test_engine.py",
    "lab/test_ray.py",
    "docs/test_docs.py",
    "docs/test_tutorial.py",
    "lab/test_commands.py",
    "lab/test_imagenet.py",
    "core/test_cli.py",
    "torch/test_frameworks.py",
    "torch/test_deepspeed.py",
    "torch/test_compiled.py",
)
"""Files with tests of many seconds. They come first, so that nobody has to wait for the last of them at the end."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items):
    from pairwise import mark_the_others

    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.path, len(SLOW)))
    mark_the_others(items)


@pytest.fixture(scope="session")
def ranks():
    """Two processes that have each other as a process group."""
    from ranks import running

    with running() as made:
        yield made
