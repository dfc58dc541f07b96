"""Tasks that ask when the carry is worth having: where large gradients are signal, and where they are corruption."""
