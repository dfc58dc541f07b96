"""Importing stays light, and arrows between modules point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import carryclip

SOURCE = Path(carryclip.__file__).parent
CORE = {"algorithm", "regions", "moments", "carry", "policy", "mixing", "precision", "diagnosis", "scopes", "groups"}
CORE |= {"_checks", "__init__", "radius"}


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_import_carryclip_loads_no_framework():
    assert not loaded_after("import carryclip") & {
        "numpy",
        "torch",
        "jax",
        "optax",
        "scipy",
        "matplotlib",
        "rich",
        "cyclopts",
    }


def test_the_reference_needs_numpy_only():
    assert not loaded_after("import carryclip.reference") & {"torch", "jax", "optax", "scipy", "matplotlib"}


def test_the_theory_needs_numpy_only():
    assert not loaded_after("import carryclip.theory") & {"torch", "jax", "optax", "scipy", "matplotlib", "rich"}


def test_one_front_end_does_not_load_the_other():
    assert "torch" not in loaded_after("import carryclip.optax")
    assert not loaded_after("import carryclip.torch") & {"jax", "optax"}


def test_the_command_line_starts_without_frameworks():
    code = "from carryclip_lab.cli import app; app(['--help'], result_action='return_value')"
    assert not loaded_after(f"{code}") & {"torch", "jax", "numpy", "matplotlib", "sklearn", "ray"}


def test_front_ends_have_all_that_one_line_needs():
    import carryclip.optax
    import carryclip.torch

    kinds = (carryclip.regions.Region, carryclip.policy.Policy, carryclip.radius.Radius)
    words = {name for name, thing in vars(carryclip).items() if isinstance(thing, type) and issubclass(thing, kinds)}
    assert {"Component", "Norm", "Shrunk", "Quantile"} <= words
    for front_end in (carryclip.torch, carryclip.optax):
        assert words <= set(front_end.__all__), front_end.__name__


NEEDS = {
    "carryclip.torch": ("torch", "pip install torch"),
    "carryclip.optax": ("optax", "pip install jax optax"),
    "carryclip.integrations.transformers": ("transformers", "pip install transformers accelerate"),
    "carryclip.integrations.gymnasium": ("gymnasium", "pip install gymnasium"),
}


@pytest.mark.parametrize("module", NEEDS)
def test_without_its_framework_a_module_says_what_to_install(module):
    framework, said = NEEDS[module]
    code = f"import sys; sys.modules[{framework!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
    assert "carryclip[" not in done.stderr, "no index has it"


@pytest.mark.parametrize("name", ["UClip", "uclip"])
def test_who_looks_for_uclip_in_the_package_is_told_where_it_is(name):
    with pytest.raises(ImportError, match=r"UClip is in carryclip\.torch; uclip is in carryclip\.optax"):
        exec(f"from carryclip import {name}")
    with pytest.raises(AttributeError, match="has no attribute 'Uclap'"):
        carryclip.Uclap  # noqa: B018
    done = loaded_after("import carryclip; getattr(carryclip, 'other', None)")
    assert not done & {"numpy", "torch", "jax", "optax"}


def test_without_lightning_its_callback_says_what_to_install():
    hidden = "sys.modules['lightning'] = sys.modules['lightning.pytorch'] = sys.modules['pytorch_lightning'] = None"
    code = f"import sys; {hidden}; import carryclip.integrations.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install lightning" in done.stderr.splitlines()[-1]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_the_core_imports_nothing_but_itself_and_the_standard_library():
    for name in CORE:
        for module in imports_of(SOURCE / f"{name}.py"):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or module in {"carryclip", *(f"carryclip.{m}" for m in CORE)}, (
                name,
                module,
            )


def test_the_judge_shares_no_arithmetic_with_the_core():
    taken = set(imports_of(SOURCE / "reference.py")) & {"carryclip.precision", "carryclip.diagnosis"}
    assert not taken
    text = (SOURCE / "reference.py").read_text()
    assert "from carryclip.algorithm import Rule\n" in text, "only the argument checks"
