"""Entry point of the `feedmill` command."""

from feedmill.shared import interrupts


def main() -> None:
    """Run the command.

    After Ctrl-C, also during the imports, it ends with status 130 and without a traceback.
    """
    interrupts.watch()
    try:
        # Takes a tenth of a second, in which Ctrl-C may come.
        from feedmill.cli.main import run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        interrupts.end()
    except SystemExit as end:
        if end.code == interrupts.INTERRUPTED:
            interrupts.end()
        raise
    except Exception:
        if interrupts.received():
            interrupts.end()
        raise
    finally:
        interrupts.stop_watching()


if __name__ == "__main__":
    main()
