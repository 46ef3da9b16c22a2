"""The command line. Reading commands talk to the daemon over HTTP; none of them loads torch."""
