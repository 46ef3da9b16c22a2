"""Where prompts and rewards come from: environments by name, and the child process that judges answers."""
