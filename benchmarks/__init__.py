"""Side by side with transformers' own models: `python -m benchmarks.decode`, `.prefill`, `.training`."""
