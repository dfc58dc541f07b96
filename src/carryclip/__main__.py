"""``python -m carryclip``, and so ``torchrun -m carryclip``."""

from carryclip.cli import main

if __name__ == "__main__":
    main()
