"""The audits of answers: other peers of a stage compute some answers again, and exclude a peer that is wrong."""
