"""Data sets: fetched, checked and kept on this machine."""
