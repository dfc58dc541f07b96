"""The theory's part of the page, from the folder that ``carryclip reproduce theory`` wrote."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from carryclip_lab.analysis.claims import VERDICTS, Claim
from carryclip_lab.checks import UserError
from carryclip_lab.report.sections import Picture, Section


class TheoryError(UserError):
    """The folder is not what ``carryclip reproduce theory`` writes."""


def read_theory(folder: Path) -> Section:
    """Figures with their captions, and the claims they were judged by."""
    try:
        record = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
        setting, tier = record["setting"], _tier(record["setting"])
        claims = [_claim(each, setting, tier) for each in record["claims"]]
    except FileNotFoundError:
        raise TheoryError(
            f"{folder} has no claims.json; make it with: carryclip reproduce theory --out {folder}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TheoryError(f"{folder / 'claims.json'} cannot be read: {error}.") from None
    return Section(
        anchor="theory",
        name="theory",
        title="The theory",
        tier=tier,
        data=f"simulations of {setting.get('steps', '?')} steps, {setting.get('seeds', '?')} seeds",
        command=str(setting.get("command", "carryclip reproduce theory")),
        environment=[("carryclip", str(setting.get("carryclip", "?")))],
        pictures=_pictures(folder),
        claims=claims,
    )


def _claim(given: dict[str, Any], setting: dict[str, Any], tier: str) -> Claim:
    """A claim of the file; older ones have the size of the runs only in the setting."""
    known = {field.name for field in fields(Claim)}
    told = {"tier": tier, "seeds": setting.get("seeds"), "command": setting.get("command", "")}
    told |= {key: value for key, value in given.items() if key in known and value not in (None, "")}
    if told.get("verdict") not in VERDICTS:
        raise ValueError(f"there is no verdict {told.get('verdict')!r}")
    return Claim(**{"ours": "", **told})


def _tier(setting: dict[str, Any]) -> str:
    from carryclip_lab.theory_figures.study import Scale

    names = ("steps", "seeds", "points")
    return Scale(**{name: setting[name] for name in names if name in setting}).tier


def _pictures(folder: Path) -> list[Picture]:
    """Every SVG that has a caption, in the order of the theory's own table."""
    from carryclip_lab.theory_figures.main import STUDIES

    found = {path.stem: path for path in sorted(folder.glob("*.svg")) if path.with_suffix(".txt").is_file()}
    names = [name for name in STUDIES if name in found] + [name for name in found if name not in STUDIES]
    return [
        Picture(
            f"theory-{name}",
            STUDIES[name].title if name in STUDIES else name,
            found[name].with_suffix(".txt").read_text(encoding="utf-8").strip(),
            found[name].read_bytes(),
        )
        for name in names
    ]
