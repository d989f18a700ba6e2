"""Run the command from a checkout: `python -m lowrank_cnn`."""

from lowrank_cnn.cli import main

main()
