"""State that is tried before it is kept: what a backward pass has done to the carry counts only if its step does."""

import torch
from torch import Tensor

from carryclip.torch._layout import Layout
from carryclip.torch._state import Ledger, OwnHome


class Stage:
    """Two sets of buffers and scalars: those of the last step that was taken, and those of the one under way."""

    def __init__(self, layout: Layout) -> None:
        self.kept = OwnHome()
        self.ledger = Ledger(layout)
        self.trial = OwnHome()
        self.trial_ledger = Ledger(layout)
        self.open = False
        """A step is under way."""

    @torch.no_grad()
    def begin(self) -> None:
        """Start from what is kept; what was tried and not kept is forgotten."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param, entries in self.kept.state.items():
            mine = self.trial.entries(param)
            for key, value in entries.items():
                if key in mine and mine[key].dtype == value.dtype:
                    targets.append(mine[key])
                    sources.append(value)
                else:
                    mine[key] = value.clone()
        for param in [param for param in self.trial.state if param not in self.kept.state]:
            del self.trial.state[param]
        if targets:
            torch._foreach_copy_(targets, sources)
        self.trial_ledger.follow(self.ledger)
        self.open = True

    def drop(self) -> None:
        """Forget what was tried."""
        self.open = False

    @torch.no_grad()
    def keep(self, unless: Tensor | None, idle: list[Tensor]) -> None:
        """Make it count, unless this is true; None where it is known to count.

        ``idle`` are parameters without a gradient: what was sent on their behalf went nowhere, so they keep what they
        had. DDP shows a parameter to its hook even if no rank has used it.
        """
        self.open = False
        for param in idle:
            self.trial.state.pop(param, None)
            if param in self.kept.state:
                self.trial.state[param] = {key: value.clone() for key, value in self.kept.state[param].items()}
        if unless is None:
            self.kept, self.trial = self.trial, self.kept
            self.ledger.follow(self.trial_ledger, counts=False)
            return
        for param, entries in self.trial.state.items():
            mine = self.kept.entries(param)
            for key, value in entries.items():
                old = mine.get(key, torch.zeros_like(value))
                mine[key] = torch.where(unless.to(value.device, non_blocking=True), old, value)
        self.ledger.follow(self.trial_ledger, counts=False, unless=unless)
