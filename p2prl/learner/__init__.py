"""From admitted groups to the next version's weights; lives in its own process."""
