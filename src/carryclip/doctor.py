"""What this machine has, and whether the parts of carryclip that need it work."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Mapping

from carryclip import __version__

PACKAGES = {
    "numpy": "carryclip.reference, carryclip.theory",
    "torch": "carryclip.torch",
    "jax": "carryclip.optax",
    "optax": "carryclip.optax",
    "lightning": "carryclip.integrations",
    "transformers": "carryclip.integrations",
    "accelerate": "carryclip.integrations",
    "deepspeed": "steps the optimizer itself",
    "tensorboard": "carryclip.integrations",
    "flax": "training states",
    "orbax-checkpoint": "checkpoints in JAX",
    "gymnasium": "carryclip.integrations",
    "stable-baselines3": "an example",
    "carryclip-lab": "studies, figures, reports",
}
"""What carryclip works with, and for what: the versions that matter in a bug report."""
Check = Callable[[], str]


def main(packages: Mapping[str, str] | None = None, checks: Mapping[str, Check] | None = None) -> int:
    """Print the findings; 0 if everything that is installed works.

    Args:
        packages: others to be listed, and what they are for.
        checks: others to be made; each says what works, or raises.
    """
    print(f"carryclip {__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"cores: {os.cpu_count()}")
    print("\npackages")
    for package, use in {**PACKAGES, **(packages or {})}.items():
        print(f"  {package:17} {version_of(package) or 'not installed':16} {use}")
    print("\nchecks")
    own: dict[str, Check] = {"reference": _check_reference, "torch": _check_torch, "optax": _check_optax}
    results = [_report(name, check) for name, check in {**own, **(checks or {})}.items()]
    print("\nAll that is installed works." if all(results) else "\nSomething is broken: see above.")
    return 0 if all(results) else 1


def version_of(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _report(name: str, check: Check) -> bool:
    try:
        print(f"  {name:17} {check()}")
    except ModuleNotFoundError as missing:
        print(f"  {name:17} not checked: {missing.name} is not installed")
    except Exception as error:  # whatever is wrong is what the reader wants to see
        print(f"  {name:17} FAILED: {type(error).__name__}: {error}")
        return False
    return True


def _check_reference() -> str:
    import numpy as np

    from carryclip import Component
    from carryclip.reference import UClip

    clipper = UClip(Component(1.0), carry=True)
    sent = [float(clipper.step([np.array([g])])[0][0]) for g in (3.0, 0.0, 0.0)]  # type: ignore[index]
    if sent != [1.0, 1.0, 1.0]:
        raise AssertionError(f"a gradient of 3 should be paid out as 1, 1, 1 but became {sent}")
    return "works"


def _check_torch() -> str:
    import torch

    from carryclip import Component
    from carryclip.torch import UClip

    devices = ["cpu"] + [f"{torch.accelerator.current_accelerator()}"] * torch.accelerator.is_available()
    for device in devices:
        weight = torch.nn.Parameter(torch.zeros(1, device=device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        clipper = UClip(optimizer, Component(1.0), carry=True)
        weight.grad = torch.full_like(weight, 3.0)
        optimizer.step()
        carry = clipper.carry(weight).item()
        if carry != 2.0:
            raise AssertionError(f"on {device} the carry of a gradient of 3 should be 2 but is {carry}")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    found = "a C++ compiler for compile=True" if compiler else "no C++ compiler, so compile=True goes on uncompiled"
    return f"works on {', '.join(devices)}; {torch.get_num_threads()} threads; {found}"


def _check_optax() -> str:
    import jax
    import jax.numpy as jnp

    from carryclip import Component
    from carryclip.optax import uclip

    tx = uclip(Component(1.0), carry=True)
    gradient = jnp.full(1, 3.0)
    _, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    carry = float(state.carry[0])
    if carry != 2.0:
        raise AssertionError(f"the carry of a gradient of 3 should be 2 but is {carry}")
    return f"works on {jax.device_count()} {jax.devices()[0].platform} device(s)"
