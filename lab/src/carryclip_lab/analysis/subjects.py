"""What each trial is about, as its task says, and what was measured of its runs."""

from carryclip_lab.spec import Spec
from carryclip_lab.store.records import last as last
from carryclip_lab.task import Judged as Subject
from carryclip_lab.task import Kind as Kind


def subject_of(spec: Spec) -> Subject | None:
    """What a spec's trial is about; None for the paper's tasks."""
    return spec.recipe.judged()
