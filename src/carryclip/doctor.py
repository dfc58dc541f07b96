"""What this machine has, and whether the parts of carryclip that need it work."""

import importlib.metadata
import json
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


def main(
    packages: Mapping[str, str] | None = None, checks: Mapping[str, Check] | None = None, *, as_json: bool = False
) -> int:
    """Print the findings; 0 if everything that is installed works.

    Args:
        packages: others to be listed, and what they are for.
        checks: others to be made; each says what works, or raises.
        as_json: print them as JSON, for programs.
    """
    uses = {**PACKAGES, **(packages or {})}
    made: dict[str, Check] = {"reference": _check_reference, "torch": _check_torch, "optax": _check_optax}
    made |= checks or {}
    if as_json:
        return _as_json(uses, made)
    print(f"carryclip {__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"cores: {os.cpu_count()}")
    print("\npackages")
    for package, use in uses.items():
        print(f"  {package:17} {version_of(package) or 'not installed':16} {use}")
    print("\nchecks")
    well = True
    for name, check in made.items():
        outcome, said = _outcome(check)
        well &= outcome != "failed"
        print(f"  {name:17} {'FAILED: ' if outcome == 'failed' else ''}{said}")
    print("\nAll that is installed works." if well else "\nSomething is broken: see above.")
    return 0 if well else 1


def _as_json(uses: Mapping[str, str], made: Mapping[str, Check]) -> int:
    outcomes = {name: _outcome(check) for name, check in made.items()}
    told = {
        "carryclip": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": {package: version_of(package) for package in uses},
        "checks": {name: {"outcome": outcome, "said": said} for name, (outcome, said) in outcomes.items()},
    }
    print(json.dumps(told, indent=1))
    return 1 if any(outcome == "failed" for outcome, _ in outcomes.values()) else 0


def version_of(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _outcome(check: Check) -> tuple[str, str]:
    """``"works"``, ``"not checked"`` or ``"failed"``, and what there is to say of it."""
    try:
        return "works", check()
    except ModuleNotFoundError as missing:
        return "not checked", f"not checked: {missing.name} is not installed"
    except Exception as error:  # whatever is wrong is what the reader wants to see
        return "failed", f"{type(error).__name__}: {error}"


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
    threads = torch.get_num_threads()
    return f"works on {', '.join(devices)}; {threads} thread{'' if threads == 1 else 's'}; {found}"


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
    count = jax.device_count()
    return f"works on {count} {jax.devices()[0].platform} device{'' if count == 1 else 's'}"
