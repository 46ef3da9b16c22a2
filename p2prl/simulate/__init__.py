"""Swarms of real nodes in one process under virtual time: same seed, same trace."""
