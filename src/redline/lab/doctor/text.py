"""A diagnosis for people, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from redline.lab.doctor.doctor import Diagnosis
from redline.lab.doctor.finding import Evidence, Finding


def lines_of(diagnosis: Diagnosis) -> Iterator[str]:
    """Give the lines: the bound, the verdict, each finding, and what could not be told."""
    yield diagnosis.bound.headline
    yield from diagnosis.bound.details
    yield diagnosis.verdict
    if diagnosis.num_delayed:
        yield f"{diagnosis.num_delayed} steps do not count: they were delayed on purpose (delays/plan in their rows)."
    for place, finding in enumerate(diagnosis.findings, 1):
        yield ""
        yield from _finding(place, finding, diagnosis)
    if diagnosis.abstentions:
        yield ""
        yield "What the recording cannot tell:"
        for why in dict.fromkeys(abstention.why for abstention in diagnosis.abstentions):
            causes = [abstention.cause for abstention in diagnosis.abstentions if abstention.why == why]
            yield f"  {', '.join(causes)}: {why}"


def _finding(place: int, finding: Finding, diagnosis: Diagnosis) -> Iterator[str]:
    gain = finding.gain
    low, likely, high = (f"{diagnosis.share(seconds):.0%}" for seconds in (gain.low_s, gain.likely_s, gain.high_s))
    yield f"{place}. {finding.title}  [{finding.cause}]"
    yield f"   {finding.why}"
    yield f"   gain: about {likely} of the time ({low} to {high}), if {gain.assumption}"
    yield from (f"   {_evidence(evidence)}" for evidence in finding.evidence)
    if finding.change:
        yield f"   change: {' '.join(finding.overrides)}"
    if finding.advice:
        yield f"   {finding.advice}"
    if proof := finding.proof(diagnosis.run):
        yield f"   prove: {proof}"
    elif finding.change:
        yield "   prove: with a second run; `redline compare` times steps, and this lies between them"


def _evidence(evidence: Evidence) -> str:
    value = evidence.value
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{evidence.name} = {shown}: {evidence.says}"
