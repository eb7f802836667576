"""`python -m redline`: the command line."""

from redline.cli import main

if __name__ == "__main__":
    main()
