"""p2prl."""

__version__ = "0.1.0"
