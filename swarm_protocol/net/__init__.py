"""The identity of peers: keys, certificates, pinned channels, and the parts of hivemind that are used."""
