"""The tasks that ship, one class in one file each; files whose names begin with an underscore help them."""
