"""`python -m skyfleet` is the command `skyfleet`."""

from skyfleet.cli.main import main

if __name__ == "__main__":
    main()
