"""The Hub repository of a trained model: its files, its card, a test that it loads, and the upload."""
