"""The command behind ``carryclip report``: from a store to figures, judged claims and one HTML file."""

import base64
import functools
import hashlib
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from carryclip import __version__
from carryclip_lab import grid
from carryclip_lab.analysis import rule, tables
from carryclip_lab.analysis.answers import DEFAULT
from carryclip_lab.analysis.claims import VERDICTS, Claim
from carryclip_lab.analysis.naming import method_of
from carryclip_lab.analysis.summary import summaries
from carryclip_lab.commands.output import make_folder, tells_errors
from carryclip_lab.engine.settings import REPORT, STORE
from carryclip_lab.report import runs
from carryclip_lab.report.sections import Picture, Section, sections
from carryclip_lab.report.theory import read_theory
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.store import Store

TIERS = ("paper", "small", "smoke")
NOT_RUN = "not run at this size"


@tells_errors
def main(store_path: str, studies: list[str], out: str, theory: str | None) -> int:
    """Write the report of some studies, or of all that the store has."""
    console = Console()
    folder = make_folder(out)
    with Store(store_path, create=False) as store, console.status("Drawing ..."):
        chosen = studies or store.studies()
        if not chosen:
            raise StoreError(f"{store_path} has no runs yet; carryclip reproduce makes them.")
        given = _given(store_path, out, theory)
        page = build(store, chosen, folder, theory=Path(theory) if theory else None, given=given)
    console.print(f"Wrote {', '.join(chosen)}: figures and their numbers are beside it.", highlight=False, markup=False)
    console.print(f"Open {page}", highlight=False, markup=False, soft_wrap=True)
    return 0


def build(
    store: Store,
    studies: Sequence[str],
    folder: Path,
    *,
    theory: Path | None = None,
    formats: Sequence[str] = ("svg", "png", "pdf"),
    given: str = "",
) -> Path:
    """Write ``report.html``, ``claims.json`` and the figures with captions and numbers; the path of the page.

    Args:
        store: where the runs are.
        studies: which ones, in the order of the page.
        folder: where to write; made if it is not there.
        theory: a folder that ``carryclip reproduce theory`` wrote, to be shown as well.
        formats: of the figures' files; SVG is always among them.
        given: options that a command needs to go on with partial results, such as ``"--store other.sqlite"``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for study in studies:
        store.title(study)  # complain before drawing anything
        store.check(study)
    shown = [section for study in dict.fromkeys(studies) for section in sections(store, study, folder, formats)]
    shown += [read_theory(theory)] if theory else []
    claims = lines(shown)
    told = {"carryclip": __version__, "claims": _claims(claims)}
    trials = [section for section in shown if section.trial]
    if trials:
        told["trials"] = {section.anchor: _trial(section) for section in trials}
        told["together"] = _together(trials)
    ruled = {study: rule.told(summaries(store, study), rule.read(name), DEFAULT) for study, name in _rules(studies)}
    if ruled:
        told["rules"] = ruled
    (folder / "claims.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = folder / "report.html"
    page.write_text(render(shown, claims, ruled, given), encoding="utf-8")
    return page


def lines(shown: Iterable[Section]) -> list[tuple[Claim, Section]]:
    """All claims, those about training first; larger tiers before smaller ones.

    A study that has nothing to say on a claim is left out if another one has.
    """
    found: dict[str, list[tuple[Claim, Section]]] = {}
    for section in shown:
        for claim in section.claims:
            found.setdefault(claim.id, []).append((claim, section))
    kept = []
    for name in sorted(found, key=lambda name: (name.startswith("T"), name)):
        spoken = [line for line in found[name] if line[0].ours] or found[name][:1]
        kept += sorted(spoken, key=lambda line: TIERS.index(line[0].tier) if line[0].tier in TIERS else len(TIERS))
    return kept


def _rules(studies: Iterable[str]) -> list[tuple[str, str]]:
    """Studies with the rules that they name."""
    return [(study, name) for study in dict.fromkeys(studies) if (name := grid.rules_of(study)) is not None]


def _given(store: str, out: str, theory: str | None) -> str:
    """The options of ``carryclip reproduce`` that are not its defaults."""
    options = {"--store": (store, STORE), "--out": (out, REPORT), "--theory": (theory, None)}
    return " ".join(f"{name} {shlex.quote(value)}" for name, (value, usual) in options.items() if value != usual)


def render(
    shown: Sequence[Section],
    claims: Sequence[tuple[Claim, Section]],
    ruled: dict[str, dict[str, Any]] | None = None,
    given: str = "",
) -> str:
    """The page, with style, script, figures and data inside.

    ``ruled`` is what the studies' rules say, ``given`` the options of a command that goes on.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    style, script = _file("page.css"), _file("page.js")
    pictures = [picture for section in shown for picture in section.pictures]
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(_file("page.html.j2"))
        .render(
            sections=shown,
            judged=[line for line in claims if line[0].verdict != NOT_RUN],
            waiting=[line for line in claims if line[0].verdict == NOT_RUN],
            counts=[(each, sum(claim.verdict == each for claim, _ in claims)) for each in VERDICTS],
            together=_together(shown),
            paper_alone=paper_alone(shown),
            default=DEFAULT.label,
            given=given,
            ruled={study: said for study, said in (ruled or {}).items() if said["lines"]},
            verdicts=[verdict for verdict in VERDICTS if any(claim.verdict == verdict for claim, _ in claims)],
            done=sum(section.done for section in shown),
            planned=sum(section.planned for section in shown),
            when=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
            version=__version__,
            style=Markup(style),
            script=Markup(script),
            policy=_policy(style, script),
            data=_data({"runs": runs.table(shown), "figures": _numbers(pictures), "claims": _claims(claims)}),
        )
    )


def paper_alone(shown: Iterable[Section]) -> bool:
    """Whether the runs have the paper's carry, but not the one that the library takes by default."""
    carries = {method_of(record.spec).carry for section in shown for record in section.records}
    return True in carries and DEFAULT.carry not in carries


def _trial(section: Section) -> dict[str, Any]:
    answers = [asdict(answer) for answer in section.answers]
    return {"heads": section.heads, "table": section.table, "answers": answers}


def _together(shown: Sequence[Section]) -> dict[str, dict[str, list[Any]]]:
    """The tables of all trials that have a line."""
    made = {name: tables.together(name, [section.lines for section in shown]) for name in tables.HEADS}
    return {name: {"heads": tables.HEADS[name], "table": table} for name, table in made.items() if table}


def _claims(claims: Sequence[tuple[Claim, Section]]) -> list[dict[str, Any]]:
    return [{**asdict(claim), "study": section.name} for claim, section in claims]


def _numbers(pictures: Iterable[Picture]) -> dict[str, Any]:
    """The rows behind each figure, names of columns once."""
    return {
        picture.anchor: {"columns": list(picture.rows[0]), "rows": [list(row.values()) for row in picture.rows]}
        for picture in pictures
        if picture.rows
    }


def _data(told: dict[str, Any]) -> Any:
    """As JSON that can stand inside a script element: what could end the element is escaped."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(told, dumps=functools.partial(json.dumps, separators=(",", ":"), allow_nan=False))


def _policy(style: str, script: str) -> str:
    """What the page may do: its own style and script, by their hashes, pictures that it contains; nothing else."""
    sources = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    allowed = f"style-src 'sha256-{sources[0]}'; script-src 'sha256-{sources[1]}'"
    return f"default-src 'none'; img-src data: blob:; {allowed}; base-uri 'none'; form-action 'none'"


def _file(name: str) -> str:
    return (resources.files("carryclip_lab.report") / name).read_text(encoding="utf-8")
