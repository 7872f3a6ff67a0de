"""The shards of the ranks of one host, which engines read as they are or as codes."""
