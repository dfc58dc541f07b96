"""A claim of the paper as one line of the report: what it says, what was seen, and a verdict computed from the data."""

from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal["holds", "holds in part", "inconclusive", "contradicted", "not run at this size"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Claim:
    """One line of the report.

    Attributes:
        id: as in the list of claims, such as ``"C1"``.
        statement: the claim in our words.
        paper: the paper's value, or where it stands.
        ours: what was seen, in numbers.
        verdict: computed by a rule that has a test.
        tier: size of the runs behind it; a number from a lower tier is never the paper's.
        seeds: runs at each point.
        command: what makes these runs.
    """

    id: str
    statement: str
    paper: str
    ours: str
    verdict: Verdict
    tier: str = ""
    seeds: int | None = None
    command: str = ""
