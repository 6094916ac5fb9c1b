"""The workshop: invocations, leases that follow live data, and the process's background service."""
