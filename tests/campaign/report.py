"""What a campaign found, as lines for people and figures for the docs."""

from __future__ import annotations

import collections
import sys
import time

from .supervisor import Outcome


class Report:
    """Filled while the campaign runs; printed line by line, and summed up at the end. ``choice``: the options that belong to
    the number of a trial."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self.began = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.frames = self.live = self.strangers = 0
        self.other: list[str] = []
        """Problems of frames and strangers."""

    def trial(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.problems:
            print(f"FAILED {outcome.trial} ({outcome.took:.1f} s)")
            for line in outcome.problems:
                print(f"    {line}")
            print(
                f"    again: python -m tests.campaign{self._choice} --replay {outcome.trial.number}"
                + (f"; logs: {outcome.folder}" if outcome.folder else "")
            )
            sys.stdout.flush()

    def problem(self, text: str) -> None:
        self.other.append(text)
        print(f"FAILED {text}")
        sys.stdout.flush()

    @property
    def failed(self) -> bool:
        return bool(self.other) or any(outcome.problems for outcome in self.outcomes)

    def summary(self) -> str:
        kinds = collections.Counter(
            kind for outcome in self.outcomes for kind in {problem.split(":")[0] for problem in outcome.problems}
        )
        lines = [f"{time.monotonic() - self.began:.0f} s"]
        if self.outcomes:
            failed = sum(bool(outcome.problems) for outcome in self.outcomes)
            operations = sum(outcome.operations for outcome in self.outcomes)
            lines.append(f"{len(self.outcomes)} fault trials, {operations:,} operations checked: {failed} trials failed")
            named = ("hang", "wrong data", "wrong error", "leak", "disturbed", "escaped")
            lines.append("trials with: " + ", ".join(f"{kind} {kinds.pop(kind, 0)}" for kind in named))
            lines += [f"    {kind}: {count}" for kind, count in kinds.items() if not kind.startswith("(")]
            lines.append(_table(self.outcomes))
        if self.frames:
            lines.append(f"{self.frames:,} mutated frames, {self.live:,} of them over live connections")
        if self.strangers:
            lines.append(f"{self.strangers:,} strange connections")
        lines.append(f"{len(self.other)} other problems" if self.other else "")
        return "\n".join(line for line in lines if line)


def _table(outcomes: list[Outcome]) -> str:
    """Trials (and failures) by workload, fault and device."""
    parts = []
    for title, keys in (
        ("workloads", lambda trial: [trial.workload]),
        ("faults", lambda trial: [fault.kind for fault in trial.faults]),
        ("devices", lambda trial: [trial.device]),
    ):
        ran: collections.Counter[str] = collections.Counter()
        bad: collections.Counter[str] = collections.Counter()
        for outcome in outcomes:
            ran.update(keys(outcome.trial))
            bad.update(keys(outcome.trial) if outcome.problems else [])
        shown = ", ".join(
            f"{key} {count}" + (f" ({bad[key]} failed)" if bad[key] else "") for key, count in sorted(ran.items())
        )
        parts.append(f"{title}: {shown}")
    return "\n".join(parts)
