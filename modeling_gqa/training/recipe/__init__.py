"""What a run is to do: its options, where they come from, and the model that they name."""
