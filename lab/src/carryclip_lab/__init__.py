"""The laboratory: what is trained, how runs get done and kept, and what figures and reports make of them."""

__version__ = "0.1.0"
