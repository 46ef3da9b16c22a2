"""Weights as versions: making a manifest, fetching its pieces from any holder, verifying the result."""
