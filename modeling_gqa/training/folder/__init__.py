"""The folder of a run: who may write there, which files are the run's, and which checkpoint is whole."""
