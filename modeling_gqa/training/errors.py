"""Errors of runs."""

from ..common.console import Interrupted, failed_to_write

__all__ = ["NON_FINITE", "Interrupted", "failed_to_write"]
NON_FINITE = "non-finite"  # what a run says that has diverged
