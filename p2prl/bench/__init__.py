"""Benchmarks and the makers of shipped data: one command each."""
