"""Growing inside your own loop."""
