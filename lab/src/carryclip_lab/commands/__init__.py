"""What the commands of the laboratory do, one module each."""
