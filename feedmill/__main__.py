"""Entry point of the `feedmill` command."""

from feedmill.cli.main import run as main

if __name__ == "__main__":
    main()
