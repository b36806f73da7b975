"""`python -m esper` is the `esper` command."""

from esper.cli import main

if __name__ == "__main__":
    main()
