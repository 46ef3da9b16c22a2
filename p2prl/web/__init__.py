"""The local page and the control API: knows a Status snapshot, a ring of events and a Commands protocol, nothing else."""
