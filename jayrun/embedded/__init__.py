"""A PostgreSQL of our own, run as a service of the host or of one user."""
