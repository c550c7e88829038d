"""`python -m compressor` is `compress`."""

from compressor.cli import main

main()
