"""Stand-ins for the parts at the other end of a connection."""
