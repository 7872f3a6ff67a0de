"""The command line. Its tools see both ends."""
