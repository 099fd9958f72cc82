"""Runs that the launches of one command share through a folder."""
