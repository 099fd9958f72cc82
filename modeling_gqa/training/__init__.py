"""Pretraining and uptraining: recipes, runs and their folders, and what they publish."""
