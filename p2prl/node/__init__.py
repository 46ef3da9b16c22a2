"""The node: wires every room, owns every loop, supervises the children."""
