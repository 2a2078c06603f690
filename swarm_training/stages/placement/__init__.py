"""The placement of peers: at which stage a peer works, when it moves to another, and what memory it needs."""
