"""Entry point of ``python -m lightning_embrace``."""

from lightning_embrace.cli import main

if __name__ == "__main__":
    main()
