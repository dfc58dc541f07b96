"""U-Clip inside trainers that own the loop: each module imports its framework, so import the one you use."""
