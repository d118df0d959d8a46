"""`python -m kvbus`."""

from kvbus.cli import main

main()
