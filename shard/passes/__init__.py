"""Passes over a captured step that say when its gathers are issued, and a table of when they are."""

from .deduplicate import deduplicate_gathers
from .prefetch import prefetch_gathers
from .regather import regather_blocks
from .report import Row, schedule, schedule_text

__all__ = ["Row", "deduplicate_gathers", "prefetch_gathers", "regather_blocks", "schedule", "schedule_text"]
