"""The mathematics of one layer: its heads, their moments, merging them, and MLA."""
