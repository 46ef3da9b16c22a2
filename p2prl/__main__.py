"""`python -m p2prl`: the same as the `p2prl` command."""

from p2prl.cli.main import main

main()
