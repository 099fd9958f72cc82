"""What a script prints."""

from ..common.console import is_main, say, warn

__all__ = ["is_main", "say", "warn"]
