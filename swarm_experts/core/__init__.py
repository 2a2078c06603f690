"""Names of experts, what is configured, who may take part, and what all rooms agree on."""
