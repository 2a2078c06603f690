"""A page that shows a run in a browser, from a server of its own."""
