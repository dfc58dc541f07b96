"""requirements.lock fits pyproject.toml and constraints.txt, and every file in it has a checksum."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LINE = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^\s;]+)"
    r"(?: ; [^\\]+?)?"  # where it is for
    r"(?: --hash=sha256:[0-9a-f]{64})+"
)


def lines_of(text: str) -> list[str]:
    """Without comments, each requirement in one line."""
    told = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return re.sub(r" \\\n\s*", " ", "\n".join(told)).splitlines()


def versions_of(text: str) -> dict[str, str]:
    found = [LINE.fullmatch(line) for line in lines_of(text)]
    return {each["name"]: each["version"] for each in found if each}


def declared() -> list[Requirement]:
    """What the two distributions ask for in development, as their files say now, and what builds them."""
    found = [*asked_by("pyproject.toml", {"dev", "docs"}), *asked_by("lab/pyproject.toml", {"ray"})]
    return [each for each in found if each.name != "carryclip"] + [Requirement("hatchling"), Requirement("editables")]


def asked_by(file: str, extras: set[str]) -> Iterator[Requirement]:
    """By a distribution with extras, which may name others of its own."""
    project = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    for each in map(Requirement, texts):
        if each.name == project["name"]:
            yield from asked_by(file, each.extras)
        else:
            yield each


def faults(lock: str, pins: str, wanted: list[Requirement]) -> list[str]:
    """What does not fit, in words."""
    told = [f"{line[:60]} is no version with checksums" for line in lines_of(lock) if not LINE.fullmatch(line)]
    locked, seen = versions_of(lock), set()
    for line in lines_of(pins):
        name, _, version = line.partition("==")
        if locked.get(canonicalize_name(name)) != version:
            told.append(f"{line} is not what is locked")
    queue = list(wanted)
    while queue:
        each = queue.pop()
        name = canonicalize_name(each.name)
        if (name, str(each)) in seen or not _applies(each):
            continue
        seen.add((name, str(each)))
        if name not in locked:
            told.append(f"{each} is not locked")
        elif locked[name] not in each.specifier:
            told.append(f"{each} is locked as {locked[name]}")
        queue += _needed_by(each, locked.get(name))
    return told


def _applies(each: Requirement) -> bool:
    return each.marker is None or each.marker.evaluate({"extra": ""})


def _needed_by(each: Requirement, version: str | None) -> list[Requirement]:
    """What it asks for in turn, where the version that is locked is the one that is installed."""
    try:
        found = metadata.distribution(each.name)
    except metadata.PackageNotFoundError:
        return []
    if found.version != version:  # a build of torch from elsewhere, such as 2.13.0+cpu, needs other libraries
        return []
    asked = [Requirement(text) for text in found.requires or ()]
    chosen = [one for one in asked if one.marker and any(one.marker.evaluate({"extra": e}) for e in each.extras)]
    plain = [one for one in asked if _applies(one)]
    for one in chosen:
        one.marker = None
    return plain + chosen


def test_the_lock_has_what_development_needs():
    assert faults(LOCK, PINS, declared()) == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (("\nnumpy==", "\nnumpy==9"), "numpy"),
        (("\npyyaml==", "\npy-yaml=="), "pyyaml"),
        (("\nattrs==", "\n--extra-index-url https://example.org\nattrs=="), "example.org"),
        (("--hash=sha256:", "--hash=md5:"), "no version with checksums"),
    ],
)
def test_a_lock_that_does_not_fit_is_noticed(broken, said):
    assert broken[0] in LOCK
    found = faults(LOCK.replace(*broken), PINS, declared())
    assert any(said in each.lower() for each in found), found


def test_a_dependency_or_a_pin_that_is_not_locked_is_noticed():
    assert faults(LOCK, "numpy==1.0", declared()) == ["numpy==1.0 is not what is locked"]
    assert faults(LOCK, PINS, [Requirement("unheard-of>=1")]) == ["unheard-of>=1 is not locked"]
