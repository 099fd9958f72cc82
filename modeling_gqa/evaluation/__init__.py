"""Trained models on the field's yardsticks: lm-eval's tasks, and four from files, which need no network."""
