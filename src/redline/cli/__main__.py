"""`python -m redline.cli` is `redline`."""

from redline.cli import main

main()
