"""Run directories as something to look at: tables, figures, and one self-contained page."""

from __future__ import annotations

from fnrfl.results.report.page import report

__all__ = ["report"]
