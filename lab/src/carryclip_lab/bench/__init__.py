"""``carryclip bench``: what clipping costs, side by side in one run."""
