"""The application and its process: routes, connections, start and end."""
