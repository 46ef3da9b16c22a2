"""Groups on their way to the learner: admission, trust, the order of replay, and the store on disk."""
