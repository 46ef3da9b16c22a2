"""The local page and the control API: knows Status, the ring of events and Commands, nothing else."""
