"""Who a peer is: identity, certificates, pinned channels, and the parts of hivemind that we use."""
