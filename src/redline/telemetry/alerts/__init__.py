"""Alerts: what a person should hear of while a run goes on.

    metrics.jsonl ──step──┐
    samples.jsonl ─sample─┼──► Detector ──Finding──► Alerts ──► console, alerts.jsonl, listeners, webhook
    lanes ────────tick────┘

A detector computes: no clock, no file, no thread, so that simulated runs drive it as a real one does. Each kind is told once
per episode, and says what was seen, since when, and what to look at.
"""

from __future__ import annotations

from redline.telemetry.alerts.detector import Detector, Episode, Finding
from redline.telemetry.alerts.monitor import Alerts, make_detectors, make_webhook

__all__ = ["Alerts", "Detector", "Episode", "Finding", "make_detectors", "make_webhook"]
