"""Studies: what is trained, how it is run, and how the results are shown."""
