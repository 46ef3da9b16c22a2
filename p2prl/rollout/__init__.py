"""Generation: engines behind one Protocol, the prompt lottery, the worker that makes signed groups."""
