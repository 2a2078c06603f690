"""The config, the record of a peer, the seam to the network, and the thread that all network traffic runs on."""
