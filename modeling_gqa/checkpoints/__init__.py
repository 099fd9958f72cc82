"""Checkpoints: opened, imported, exported, and written beside their targets."""
