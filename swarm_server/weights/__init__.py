"""The checkpoint's files given to others: what is offered, and how fast it is sent."""
