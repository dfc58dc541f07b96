"""How runs get done: taken from the store, trained in processes of their own, and written back, whatever is killed."""
