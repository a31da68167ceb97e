"""`python -m moefold` and `torchrun -m moefold` are the command line."""

from moefold.cli.main import main

if __name__ == "__main__":
    main()
