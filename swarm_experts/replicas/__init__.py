"""The state of experts at other servers: kept for others, sent to them, and loaded by who takes an expert's place."""
