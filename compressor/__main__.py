"""`python -m compressor` is `compress`."""

from compressor.cli.app import main
from compressor.runtime.interrupts import exit_without_teardown


def run() -> None:
    """Run the command as the only work of this process."""
    with exit_without_teardown():
        main()


if __name__ == "__main__":
    run()
