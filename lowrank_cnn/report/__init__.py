"""Pictures of what was gained: the page about a set of runs, and the paper's figures."""

from __future__ import annotations

from lowrank_cnn.report.page import write_report
from lowrank_cnn.report.records import Records, read_records

__all__ = ["Records", "read_records", "write_report"]
