"""`python -m compressor` is `compress`."""

from compressor.cli.app import main
from compressor.runtime.interrupts import leaving_at_once


def run() -> None:
    """The command in a process of its own."""
    with leaving_at_once():
        main()


if __name__ == "__main__":
    run()
